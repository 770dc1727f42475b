"""Your own data and network are trained, resumed, evaluated and converted, or refused before training."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from gluon_mgpu import evaluate
from gluon_mgpu import train as training
from gluon_mgpu.data import datasets, own_data
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import registry

CLASSES, SHAPE = 3, (2, 5, 6)
OPTIONS = {"model": "mlp", "lr": 0.1, "batch_size": 20, "device": "cpu", "seed": 1}


def examples(n, seed=0, classes=CLASSES, shape=SHAPE):
    """Images of a random picture per class, with noise, and their labels."""
    pictures = np.random.default_rng(7).uniform(60, 190, (classes, *shape))
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % classes)
    return (pictures[labels] + rng.uniform(-60, 60, (n, *shape))).astype(np.uint8), labels


ARRAYS = (*examples(200), *examples(50, 1))


def mlp(classes=CLASSES):
    net = nn.HybridSequential()
    net.add(nn.Flatten(), nn.Dense(16, activation="relu"), nn.Dense(classes))
    return net


registry.register("mlp", mlp, mx.init.Xavier())
registry.register("mlp for one class", lambda: mlp(1))


def train(**options):
    return training("highlevel", 2, **{**OPTIONS, **options})


def test_evaluate_refuses_other_data_and_labels_that_the_network_has_no_score_for(tmp_path):
    np.savez(tmp_path / "data.npz", **dict(zip(own_data.PARTS, ARRAYS)))
    train(dataset="own", data_dir=tmp_path, epochs=1, out=tmp_path / "run")
    trained = evaluate.load(tmp_path / "run", device="cpu")
    images, labels = evaluate.held_out(trained.run, tmp_path)
    assert f"/{len(labels)})" in evaluate.report(trained, images, labels)
    with pytest.raises(UsageError):
        evaluate.report(trained, images, labels + CLASSES)
    np.savez(tmp_path / "data.npz", **dict(zip(own_data.PARTS, (*ARRAYS[:3], ARRAYS[3] % 2))))
    with pytest.raises(UsageError) as caught:
        evaluate.held_out(trained.run, tmp_path)
    assert caught.value.name == "data_dir"


def npz(folder, names=own_data.PARTS, arrays=ARRAYS):
    np.savez_compressed(folder / "data.npz", **dict(zip(names, arrays)))


@pytest.mark.parametrize("names", [own_data.PARTS, own_data.KERAS], ids=["npz", "keras"])
@pytest.mark.parametrize("seed", range(5))
def test_a_folder_gives_the_arrays_that_were_written(names, seed, tmp_path, monkeypatch):
    rng = np.random.default_rng(seed)
    n, channels, height = rng.integers(1, 9, 3)
    shape = (channels, height, rng.choice((2, 5, 6, 7)))  # not as if the channels were last
    arrays = (*examples(n, seed, shape=shape), *examples(n + 2, seed + 1, shape=shape))
    npz(tmp_path, names, arrays)
    monkeypatch.setenv("GLUON_MGPU_DATA", str(tmp_path))
    for found in (datasets.load("own"), datasets.load("own", tmp_path)):
        for part, array in zip(found[1:5], arrays):
            np.testing.assert_array_equal(part, array)


def change(path, to):
    path.write_bytes(to(path.read_bytes()))


@pytest.mark.parametrize(
    "write, error",
    [
        (lambda folder: None, UsageError),
        (lambda folder: npz(folder, "abcd"), UsageError),
        (lambda folder: [npz(folder), (folder / "more.npz").touch()], UsageError),
        (lambda folder: [npz(folder), change(folder / "data.npz", lambda content: content[:-500])], Error),
        (lambda folder: np.savez(folder / "data.npz", **dict.fromkeys(own_data.PARTS, np.array([None]))), Error),
    ],
    ids="nothing other-names two-archives damaged pickled".split(),
)
def test_a_folder_without_valid_data_is_refused(write, error, tmp_path):
    write(tmp_path)
    with pytest.raises(Error) as caught:
        datasets.load("own", tmp_path)
    assert type(caught.value) is error and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("train_images", ARRAYS[0][0, 0]),
        ("train_images", ARRAYS[0].astype(int)),
        ("test_images", np.full((50, *SHAPE), np.nan)),
        ("train_images", np.full((50, *SHAPE), 1e39).tolist()),  # infinite in float32
        ("test_images", ARRAYS[2][..., 1:]),
        ("test_images", ARRAYS[2].astype(np.float32)),
        ("train_labels", ARRAYS[1][:-1]),
        ("train_labels", ARRAYS[1] + 0.0),
        ("test_labels", ARRAYS[3] - 1),
    ],
)
def test_an_array_that_does_not_fit_is_a_usage_error_that_names_it(name, wrong):
    with pytest.raises(UsageError) as caught:
        datasets.own(**{**dict(zip(own_data.PARTS, ARRAYS)), name: wrong})
    assert caught.value.name == name


@pytest.mark.parametrize("shape", [(3, 32, 48), (1, 32, 48), (3, 5, 6), (4, 8, 8)])
def test_images_with_the_channels_last_are_moved_with_a_notice(shape, capsys):
    images, labels = examples(20, shape=shape)
    last = images.transpose(0, 2, 3, 1)
    data = datasets.own(last, labels, last, labels)
    np.testing.assert_array_equal(data.train_images, images)
    assert capsys.readouterr().err.count("channels last") == 2
    assert datasets.own(images, labels, images, labels).checksum() == data.checksum()
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_data_of_one_class_and_of_more_examples_than_the_built_in_sets_can_be_trained_with():
    images, labels = np.zeros((60002, 1, 1), np.uint8), np.zeros(60002, np.uint8)
    data = datasets.own(images, labels, images[:5], labels[:5])
    (epoch,) = train(model="mlp for one class", dataset=data, limit=60002, epochs=1, batch_size=1000)
    assert epoch.test_accuracy == 1
