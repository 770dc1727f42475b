"""Public functions check what commands check: they refuse each kind of bad value with a UsageError in one line."""

import numpy as np
import pytest
from runs import refuses

from gluon_mgpu import evaluate, train
from gluon_mgpu.data import datasets
from gluon_mgpu.data.batches import batches
from gluon_mgpu.data.splitting import shard_sizes

DATA = datasets.synthetic(60, 100)
IMAGES, LABELS = DATA.test_images, DATA.test_labels
WIDE = IMAGES.reshape(-1, 1, 14, 56)  # of the same length
PARTS = {"train_images": IMAGES, "train_labels": LABELS, "test_images": IMAGES, "test_labels": LABELS}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("run")
    train("scratch", 1, 30, 0.1, dataset="synthetic", limit=60, epochs=1, seed=0, device="cpu", out=folder)
    return folder


@pytest.fixture(scope="module")
def trained(run):
    return evaluate.load(run, device="cpu")


BAD_IMAGES = {
    "none": None,
    "text": "images",
    "rows of different lengths": [[1, 2], [3]],
    "no examples": IMAGES[:0],
    "five dimensions": IMAGES[None],
    "whole numbers": IMAGES.astype(int),
    "objects": IMAGES.astype(object),
    "masked": np.ma.masked_less(IMAGES, 5),
    "not finite": np.where(IMAGES > 5, np.nan, 0),
    "too large for float32": np.full(IMAGES.shape, 1e39),
}
BAD_LABELS = {
    "none": None,
    "text": "labels",
    "too few": LABELS[:-1],
    "negative": LABELS.astype(int) - 1,
    "too large": LABELS.astype(np.int64) + 2**40,
    "floats": LABELS / 2,
    "objects": LABELS.astype(object),
    "masked": np.ma.masked_equal(LABELS, 5),
}
BAD_NUMBERS = {
    "zero": 0,
    "negative": -1,
    "fraction": 1.5,
    "not finite": float("nan"),
    "text": "many",
    "boolean": True,
    "NumPy's boolean": np.True_,
    "array": np.zeros((100, 100)),
    "list": [*range(5000)],
}


def bad(values, *omitted):
    return [pytest.param(value, id=kind) for kind, value in values.items() if kind not in omitted]


@pytest.mark.parametrize("value", bad(BAD_IMAGES))
def test_images_that_cannot_be_used_are_refused(value, trained):
    for name in ("train_images", "test_images"):
        refuses(name, datasets.own, **{**PARTS, name: value})
    refuses("images", evaluate.scores, trained, value)
    refuses("images", evaluate.report, trained, value, LABELS)
    pictures = [] if value is None or isinstance(value, str) else value
    refuses("images", evaluate.classify, trained, ["a"], pictures)


@pytest.mark.parametrize("value", bad(BAD_LABELS))
def test_labels_that_cannot_be_used_are_refused(value, trained):
    for name in ("train_labels", "test_labels"):
        refuses(name, datasets.own, **{**PARTS, name: value})
    refuses("labels", evaluate.report, trained, IMAGES, value)


def test_images_and_labels_that_do_not_fit_the_network_are_refused(trained):
    for other in (WIDE, IMAGES.astype(np.float32)):
        refuses("test_images", datasets.own, **{**PARTS, "test_images": other})
    for function in (evaluate.scores, lambda trained, images: evaluate.report(trained, images, LABELS)):
        refuses("images", function, trained, WIDE)
        refuses("images", function, trained, IMAGES.repeat(3, axis=1))
    refuses("labels", evaluate.report, trained, IMAGES, LABELS + 1)
    refuses("images", evaluate.classify, trained, ["a"], [WIDE[0]])
    refuses("images", evaluate.classify, trained, ["a", "b"], [IMAGES[0]])
    refuses("images", evaluate.scores, trained, IMAGES.astype(float))  # 0 to 255
    for shape in ((28, 28), (1, 0, 28), (1, 2.5, 28), "abc", None):
        refuses("shape", evaluate.read_image, "a.png", shape)


def test_a_data_set_that_a_program_has_changed_is_checked_again():
    settings = {"epochs": 1, "batch_size": 30, "device": "cpu"}
    empty = DATA._replace(test_images=IMAGES[:0], test_labels=LABELS[:0])
    for name, wrong in (("test_images", empty), ("train_labels", DATA._replace(train_labels=DATA.train_labels[1:]))):
        refuses(name, train, "scratch", dataset=wrong, **settings)
    for labels in (-DATA.train_labels.astype(int), DATA.train_labels + 5):  # of more classes than this data has
        refuses("train_labels", train, "scratch", dataset=DATA._replace(train_labels=labels))
    for wrong in (IMAGES, DATA[1:5], ["mnist"], 5):
        refuses("dataset", train, "scratch", dataset=wrong, **settings)


def test_a_folder_and_devices_that_cannot_be_used_are_refused(run, trained, tmp_path):
    for folder in (None, 5, b"run", "a\0b", np.zeros(300), tmp_path):
        refuses(None if folder is tmp_path else "folder", evaluate.load, folder)
    for gpus in (0, -1, 1.0, "two", True, [True], [0, 0], [], np.zeros(300)):
        refuses("gpus", evaluate.load, run, None, gpus, "cpu")
        refuses("gpus", train, "scratch", gpus, dataset="synthetic", limit=60)
    for device in ("tpu", None, np.zeros(300)):
        refuses("device", evaluate.load, run, None, 1, device)
    for data_dir in (5, b"data", str(tmp_path)):
        refuses("data_dir", evaluate.held_out, trained.run, data_dir)


@pytest.mark.parametrize("value", bad(BAD_NUMBERS))
def test_numbers_that_cannot_be_used_are_refused(value):
    settings = {"epochs": 1, "dataset": "synthetic", "limit": 60, "device": "cpu"}
    for name in ("batch_size", "limit", "epochs"):
        refuses(name, train, "scratch", **{**settings, name: value})
    refuses("limit", datasets.load, "synthetic", limit=value)
    refuses("limit", DATA.first, value)
    refuses("batch_size", datasets.load_fashion_mnist, value)
    refuses("batch_size", lambda size: next(batches(IMAGES, LABELS, size)), value)
    refuses("parts", shard_sizes, 3, value)
    if np.ndim(value) or value != 0:
        refuses("seed", datasets.load, "synthetic", limit=60, seed=value)


@pytest.mark.parametrize("shares", [[], [1], [1, 2, 3], [1, 0], [1, -1], [1, np.inf], [1, np.nan]], ids=str)
def test_shares_that_cannot_be_used_are_refused(shares):
    refuses("shares", shard_sizes, 9, 2, shares)


@pytest.mark.parametrize("lr", [1e308, 1e39, 1e-45, 1e-320, *(v for k, v in BAD_NUMBERS.items() if k != "fraction")])
def test_a_learning_rate_that_mxnet_cannot_take_is_refused(lr):
    refuses("lr", train, "scratch", lr=lr, dataset="synthetic", limit=60, device="cpu", epochs=1)


@pytest.mark.parametrize("momentum", [1e-320, 1, np.True_])
def test_a_momentum_that_mxnet_cannot_take_is_refused(momentum):
    refuses("momentum", train, "highlevel", momentum=momentum, dataset="synthetic", limit=60, device="cpu", epochs=1)


def test_lists_and_ndarrays_are_as_good_as_arrays(trained):
    from mxnet import nd

    expected = evaluate.report(trained, IMAGES, LABELS)
    assert evaluate.report(trained, nd.array(IMAGES, dtype="uint8"), LABELS.tolist()) == expected
    assert evaluate.report(trained, IMAGES[:, 0], np.ma.masked_array(LABELS)[:, None]) == expected
    nested = datasets.own(IMAGES, LABELS.tolist(), nd.array(IMAGES, dtype="uint8"), LABELS)
    assert nested.checksum() == datasets.own(IMAGES, LABELS.astype(int), IMAGES, LABELS).checksum()
