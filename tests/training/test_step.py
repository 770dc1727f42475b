"""Steps with what LeNet lacks: batch normalization, frozen, shared and replaced arrays, and names of its own."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.gluon import nn

from gluon_mgpu import evaluate, train
from gluon_mgpu.training import lessons, models, registry
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import read_arrays
from gluon_mgpu.training.record import read
from gluon_mgpu.training.step import assemble
from gluon_mgpu.training.workers import Group


def normalized():
    net = nn.HybridSequential(prefix="normalized_")
    with net.name_scope():
        net.add(nn.Conv2D(6, 3, strides=2, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D())
        net.add(nn.Dense(20, use_bias=False), nn.BatchNorm(scale=False), nn.Dense(10))
    return net


registry.register("normalized", normalized, mx.init.Xavier())
registry.register("other names", normalized, mx.init.Xavier(), names="abcdefghijkl")


def create(devices, seed=0, model="normalized", **settings):
    mx.random.seed(seed)
    ctx = [mx.cpu(i) for i in range(devices)]
    return models.create_model("highlevel", ctx, Config(impl="highlevel", model=model, **settings))


@pytest.mark.parametrize("model, hybridize", [("normalized", True), ("normalized", False), ("other names", True)])
def test_replicas_with_batch_normalization_stay_equal(model, hybridize):
    model = create(2, model=model, shares=(3, 1), hybridize=hybridize)
    step = assemble(model, Group())
    for n in (8, 5, 2, 8):
        step(nd.random.uniform(shape=(n, 1, 28, 28)), nd.arange(n), 0.1)
    np.testing.assert_equal(read_arrays(model, 1), read_arrays(model, 0))


def test_a_parameter_that_two_layers_share_is_trained_once():
    def lenet():
        net = nn.HybridSequential()
        with net.name_scope():
            net.add(nn.Dense(16), nn.Dense(16, in_units=16))
            net.add(nn.Dense(16, in_units=16, params=net[1].params), nn.Dense(10))
        return net

    model = models.create_model(lessons.load("highlevel", lenet=lenet), [mx.cpu(0), mx.cpu(1)])
    before = read_arrays(model)
    model.step(mx.nd.random.uniform(shape=(8, 1, 28, 28)), mx.nd.zeros(8), 0.1)
    shared = [name for name in before if before[name].shape == (16, 16)]
    assert len(shared) == 1 and (before[shared[0]] != read_arrays(model)[shared[0]]).any()


def test_gradients_are_those_of_the_arrays_that_a_lesson_replaces_in_each_step():
    def sgd(params, lr, batch_size):
        for i, p in enumerate(params):
            params[i] = p - lr * p.grad / batch_size
            params[i].attach_grad()

    lesson = lessons.load("scratch", sgd=sgd)
    options = {"dataset": "synthetic", "limit": 100, "epochs": 1, "seed": 1, "device": "cpu", "shares": (1, 1)}
    own, ours = (train(impl, 2, 20, 0.2, **options)[0].train_loss for impl in (lesson, "scratch"))
    assert own == pytest.approx(ours, rel=1e-5)


def test_every_array_is_saved_and_all_but_the_frozen_one_are_trained(tmp_path):
    options = {"model": "normalized", "dataset": "synthetic", "limit": 900, "seed": 1, "device": "cpu", "epochs": 1}
    train("highlevel", 2, 50, 0.05, **options, momentum=0.9, out=tmp_path / "run")
    run = tmp_path / "run"
    trained = read_arrays(evaluate.load(run, gpus=2, device="cpu").model)
    initial = read_arrays(create(2, seed=1))
    # Weights of three layers and one bias; two times gamma, beta, mean and variance.
    assert len(trained) == 3 + 1 + 2 * 4 and trained.keys() == initial.keys()
    assert [name for name, array in initial.items() if np.array_equal(array, trained[name])] == ["5.gamma"]
    velocities = [name for name in read(run).arrays if name.startswith("velocity/")]
    assert len(velocities) == len(trained) - 5  # none for the frozen array, the means and the variances
