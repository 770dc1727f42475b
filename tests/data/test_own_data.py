"""Your own data is read from a file or taken as arrays, or refused before training."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from gluon_mgpu import train
from gluon_mgpu.data import datasets, own_data
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import registry


def examples(n, shape=(2, 5, 6)):
    """Random images and labels."""
    rng = np.random.default_rng(n)
    return rng.integers(0, 256, (n, *shape)).astype(np.uint8), np.arange(n) % 3


ARRAYS = (*examples(20), *examples(5))


def npz(folder, names=own_data.PARTS, arrays=ARRAYS):
    np.savez_compressed(folder / "data.npz", **dict(zip(names, arrays)))


@pytest.mark.parametrize("names", [own_data.PARTS, own_data.KERAS], ids=["npz", "keras"])
@pytest.mark.parametrize("shape", [(1, 7, 2), (3, 1, 5), (8, 4, 6)])
def test_a_folder_gives_the_first_examples_of_the_arrays_that_were_written(names, shape, tmp_path, monkeypatch):
    arrays = (*examples(9, shape), *examples(4, shape))
    npz(tmp_path, names, arrays)
    monkeypatch.setenv("GLUON_MGPU_DATA", str(tmp_path))
    for found in (datasets.load("own"), datasets.load("own", tmp_path, limit=6)):
        for part, array in zip(found[1:5], arrays):
            np.testing.assert_array_equal(part, array[: len(part)])
    assert [len(part) for part in found[1:5]] == [6, 6, 4, 4]


def cut(path):
    path.write_bytes(path.read_bytes()[:-500])


@pytest.mark.parametrize(
    "write, error",
    [
        (lambda folder: None, UsageError),
        (lambda folder: npz(folder, "abcd"), UsageError),
        (lambda folder: [npz(folder), (folder / "more.npz").touch()], UsageError),
        (lambda folder: [npz(folder), cut(folder / "data.npz")], Error),
        (lambda folder: np.savez(folder / "data.npz", **dict.fromkeys(own_data.PARTS, np.array([None]))), Error),
    ],
    ids="nothing other-names two-archives damaged pickled".split(),
)
def test_a_folder_without_valid_data_is_refused(write, error, tmp_path):
    write(tmp_path)
    with pytest.raises(Error) as caught:
        datasets.load("own", tmp_path)
    assert type(caught.value) is error and "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 32, 48), (1, 32, 48), (3, 5, 6), (4, 8, 8)])
def test_images_with_the_channels_last_are_moved_with_a_notice(shape, capsys):
    images, labels = examples(20, shape)
    last = images.transpose(0, 2, 3, 1)
    data = datasets.own(last, labels, last, labels)
    np.testing.assert_array_equal(data.train_images, images)
    assert capsys.readouterr().err.count("\n") == 2
    assert datasets.own(images, labels, images, labels).checksum() == data.checksum()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_data_of_one_class_and_of_more_examples_than_the_built_in_sets_can_be_trained_with():
    registry.register("one class", lambda: nn.Dense(1), mx.init.Zero())
    images, labels = np.zeros((60002, 1, 1), np.uint8), np.zeros(60002, np.uint8)
    data = datasets.own(images, labels, images[:5], labels[:5])
    (epoch,) = train("highlevel", 2, 1000, 0.1, 1, model="one class", dataset=data, limit=60002, device="cpu", seed=1)
    assert epoch.test_accuracy == 1
