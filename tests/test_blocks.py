"""What `blocks` changes is how LeNet is computed, not what: held against the same network without it."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.training import tuning as blocks
from gluon_mgpu.training.settings import Settings


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """As on a processor with AVX-512."""
    monkeypatch.setattr(blocks, "USED", True)


def trained(ctx, used, monkeypatch, sizes=(256, 130, 7), **settings):
    """(parameters, gradients, scores) after steps on batches of these sizes, with `blocks` or without."""
    monkeypatch.setattr(blocks, "USED", used)
    mx.random.seed(3)
    replicas = highlevel.Replicas(ctx, Settings(256, **settings))
    rng = np.random.default_rng(5)
    shapes = {name: p.shape for name, p in replicas.parameters().items()}
    weights = {name: 0.1 * rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    replicas.load(weights, {})
    X, y = nd.array(rng.random((max(sizes), 1, 28, 28))), nd.array(rng.integers(0, 10, max(sizes)))
    for n in sizes:
        replicas.train_batch(X[:n], y[:n], 0.1)
    scores = np.concatenate([shard.asnumpy() for shard in replicas.predict(X)])
    return replicas.parameters(), replicas.gradients(), scores


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 1e-3, "clip_norm": 1.0, "accumulate": 2}])
def test_training_is_that_of_lenet_as_it_is_written(devices, settings, monkeypatch):
    ctx = [mx.cpu(i) for i in range(devices)]
    blocked, plain = (trained(ctx, used, monkeypatch, **settings) for used in (True, False))
    for of_blocked, of_plain in zip(blocked[:2], plain[:2]):
        assert of_blocked.keys() == of_plain.keys()
        for name, expected in of_plain.items():
            assert of_blocked[name].shape == expected.shape
            np.testing.assert_allclose(of_blocked[name], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(blocked[2], plain[2], rtol=0, atol=2e-5 * np.abs(plain[2]).max())


def test_max_pooling_is_left_as_it_is_too(monkeypatch):
    ctx = [mx.cpu(0), mx.cpu(1)]
    blocked, plain = (trained(ctx, used, monkeypatch, model="lenet-max") for used in (True, False))
    for name, expected in plain[0].items():
        np.testing.assert_allclose(blocked[0][name], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("examples", [1, 63, 64, 65, 128, 300])
def test_a_net_in_pieces_gives_every_examples_scores_in_their_order(examples):
    net = highlevel.lenet()
    highlevel.initialize(net, [mx.cpu()], init=mx.init.Normal(0.1))
    X = nd.random.uniform(shape=(examples, 1, 28, 28))
    in_pieces = net(X).asnumpy()
    one_by_one = np.concatenate([net(X[i : i + 1]).asnumpy() for i in range(examples)])
    np.testing.assert_allclose(in_pieces, one_by_one, rtol=0, atol=1e-5 * np.abs(one_by_one).max())


def test_a_convolution_keeps_gluons_parameters_and_gives_gluons_channels_first():
    ours = blocks.Conv2D(channels=20, in_channels=3, kernel_size=3, activation="relu", strides=2, padding=1)
    gluons = gluon.nn.Conv2D(channels=20, in_channels=3, kernel_size=3, activation="relu", strides=2, padding=1)
    for layer in (ours, gluons):
        layer.initialize(ctx=mx.cpu(1))
    for mine, theirs in zip(ours.collect_params().values(), gluons.collect_params().values()):
        assert mine.shape == theirs.shape
        mine.set_data(nd.random.normal(shape=mine.shape))
        theirs.set_data(mine.data())
    X = nd.zeros((2, 16, 9, 9), mx.cpu(1))  # 3 channels, and those that an earlier layer added
    X[:, :3] = nd.random.normal(shape=(2, 3, 9, 9))
    found, expected = ours(X).asnumpy(), gluons(X[:, :3]).asnumpy()
    assert found.shape == (2, 32, 5, 5) and not found[:, 20:].any()
    np.testing.assert_allclose(found[:, :20], expected, rtol=1e-4, atol=1e-5)


def test_without_avx512_or_beside_gpus_nothing_is_added(monkeypatch):
    monkeypatch.setattr(blocks, "USED", False)
    net = highlevel.lenet()
    highlevel.initialize(net, [mx.cpu()])
    net(nd.zeros((200, 1, 28, 28)))
    assert not net.graphs


def test_a_net_that_is_hybridized_anew_or_made_as_written_forgets_its_graphs_or_has_none():
    net, X = highlevel.lenet(), nd.random.uniform(shape=(200, 1, 28, 28))
    highlevel.initialize(net, [mx.cpu()])
    scores = net(X).asnumpy()
    (graph,) = net.graphs.values()
    net(X[:130])
    assert list(net.graphs) == [4, 3] and net.graphs[4] is graph
    net.hybridize(False)
    assert not net.graphs
    np.testing.assert_allclose(net(X).asnumpy(), scores, rtol=0, atol=1e-5 * np.abs(scores).max())
    with blocks.as_written():
        written = highlevel.lenet()
        highlevel.initialize(written, [mx.cpu()])
        written(X)
    assert not written.graphs and blocks.USED


def test_a_replicas_velocities_are_lenets_and_go_on(monkeypatch):
    X, y = nd.random.uniform(shape=(64, 1, 28, 28)), nd.floor(nd.random.uniform(0, 10, shape=64))
    made = scratch.Replicas([mx.cpu(0), mx.cpu(1)], Settings(64, momentum=0.9))
    made.train_batch(X, y, 0.1)
    kept, velocities = made.parameters(), made.velocities()
    assert {name: v.shape for name, v in velocities.items()} == {name: p.shape for name, p in kept.items()}
    made.train_batch(X, y, 0.1)
    for module in (scratch, highlevel):
        other = module.Replicas([mx.cpu(0), mx.cpu(1)], Settings(64, momentum=0.9))
        other.load(kept, velocities)
        other.train_batch(X, y, 0.1)
        for name, expected in made.parameters().items():
            np.testing.assert_allclose(other.parameters()[name], expected, rtol=0, atol=1e-6 * np.abs(expected).max())
