"""Twenty steps of each lesson end where LeNet in float64 NumPy ends, with every MXNet and on every processor.

So two versions or processors differ by at most twice the limit.
"""

from functools import partial

import mxnet as mx
import numpy as np
import pytest
import reference
from mxnet import nd

from gluon_mgpu import sharded
from gluon_mgpu.data import datasets
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import LENET_NAMES, create_model

STEPS, BATCH, LR = 20, 64, 0.01
DATA = datasets.synthetic(STEPS * BATCH, 100, seed=4)
# Rounding moves a step by about 1e-4 of its length. Now and then, it also moves the input of a ReLU to the other side
# of 0, which changes one of BATCH examples' gradients. Their directions differ, so each is about sqrt(BATCH) times as
# long as their mean. Such flips are rare in 20 steps: allow for one.
LIMIT = 1 / np.sqrt(BATCH) / STEPS
START = reference.initial(biases=0.1)


@pytest.fixture(scope="module")
def expected():
    starts = range(0, STEPS * BATCH, BATCH)
    batches = [(DATA.train_images[i : i + BATCH] / 255, DATA.train_labels[i : i + BATCH]) for i in starts]
    *_, (_, _, params) = reference.steps(START, batches, LR)
    return params


LESSONS = pytest.mark.parametrize(
    "options", [{"impl": "scratch"}, {"impl": "highlevel"}, {"impl": "highlevel", "hybridize": False}]
    + [{"impl": "sharded", "step": step} for step in ("ddp", "zero1", "zero2", "zero3")],
    ids=lambda options: "-".join(map(str, options.values())),
)  # fmt: skip


def batches():
    for i in range(0, STEPS * BATCH, BATCH):
        X = nd.array(DATA.train_images[i : i + BATCH], dtype="float32") / 255
        yield X, nd.array(DATA.train_labels[i : i + BATCH], dtype="float32")


def trained(ctx, options):
    """LeNet's parameters after the steps of scratch or highlevel, on the last device."""
    model = create_model(options["impl"], ctx, Config(batch_size=BATCH, lr=LR, **options))
    model.load(dict(zip(LENET_NAMES, START)))
    for X, y in batches():
        model.step(X, y, LR)
    return [model.arrays(len(ctx) - 1)[name] for name in LENET_NAMES]


def sharded_trained(ctx, step):
    """LeNet's parameters after the steps of one of sharded's functions."""
    params, net = [nd.array(p) for p in START], sharded.LENET
    weights = sharded.place(net, params, ctx, sharded=step == "zero3")
    velocities = sharded.place(net, [nd.zeros_like(p) for p in params], ctx, sharded=step != "ddp")
    for X, y in batches():
        getattr(sharded, step)(X, y, net, weights, [velocities], ctx, partial(sharded.sgd, lr=LR, momentum=0))
    return sharded.collect(net, weights, sharded=step == "zero3")


def assert_twenty_steps_end_at(expected, ctx, options):
    arrays = sharded_trained(ctx, options["step"]) if "step" in options else trained(ctx, options)
    ends = np.concatenate([array.asnumpy().ravel() for array in arrays])
    first, right = (np.concatenate([p.ravel() for p in params]) for params in (START, expected))
    moved, error = np.linalg.norm(right - first), np.linalg.norm(ends - right)
    print(f"error {error / moved:.1e} of the path's length {moved:.2f}")
    assert error < LIMIT * moved


@LESSONS
def test_twenty_steps_on_two_devices_end_where_float64_ends(options, expected):
    assert_twenty_steps_end_at(expected, [mx.cpu(0), mx.cpu(1)], options)
