"""What the twins of scratch, programs for PyTorch and for JAX, are compared with."""

import os
from functools import cache

import mxnet as mx
import numpy as np
from lenet64 import EPSILON, additions
from mxnet import nd

from gluon_mgpu import scratch
from gluon_mgpu.data import batches, datasets
from gluon_mgpu.runtime import engine

SIZE, STEPS, LR = 256, 20, 0.02
OPTIONS = f"--dataset synthetic --limit {SIZE * STEPS} --epochs 1 --lr {LR}".split()


def without_mxnet(folder):
    """The environment of a program that must not import MXNet. A module that says so is written to the folder."""
    (folder / "mxnet.py").write_text("raise ImportError('the programs run without MXNet')")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**engine.users_environment(), "PYTHONPATH": path}


def initial():
    """The parameters that the programs draw."""
    rng, params = np.random.default_rng(1), []
    for shape in [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]:
        params += [rng.normal(0, 0.1, shape).astype(np.float32), np.zeros(shape[0], np.float32)]
    return params


@cache
def trained_by_scratch():
    """The parameters after 20 steps on two contexts, and the largest change of each array in each step."""
    data, ctx = datasets.load("synthetic", limit=SIZE * STEPS), [mx.cpu(0), mx.cpu(1)]
    replicas = [scratch.get_params([nd.array(p) for p in initial()], c) for c in ctx]
    order = batches.shuffled(SIZE * STEPS, seed=1, epoch=1)
    now, changes = initial(), []
    for X, y in batches.batches(data.train_images, data.train_labels, SIZE, order):
        scratch.train_batch(X, y, replicas, ctx, LR)
        before, now = now, [p.asnumpy() for p in replicas[0]]
        changes.append([np.abs(a - b).max() for a, b in zip(now, before)])
    return now, np.array(changes)


def assert_trained_as_scratch(file):
    """Fail if the parameters in an .npz file differ from scratch's by more than rounding can explain."""
    expected, changes = trained_by_scratch()
    # As in lenet64.assert_close: a sum of n numbers has a relative error of at most n * EPSILON, in each step.
    rounding = EPSILON * additions(SIZE) * changes.sum(0)
    for a, b, most in zip(np.load(file).values(), expected, rounding):
        assert np.abs(a - b).max() <= most
