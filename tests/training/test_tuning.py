"""Tuning changes how a network is computed, but not the results: compares the tuned network with the original."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd
from mxnet.gluon import nn
from reference import EPSILON

from gluon_mgpu import networks
from gluon_mgpu.training import tuning
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import create_model


def network(*layers, channels=1):
    net = nn.HybridSequential()
    net.add(*layers)
    net.initialize(mx.init.Normal(0.1))
    net(nd.zeros((1, channels, 28, 28)))
    return net


NETWORKS = {  # without kinks, so two ways to compute a network differ only by rounding
    "lenet with sigmoids": lambda: network(
        *(nn.Conv2D(20, 3, activation="sigmoid"), nn.AvgPool2D()),
        *(nn.Conv2D(50, 5, activation="sigmoid", use_bias=False), nn.AvgPool2D()),
        *(nn.Dense(128, activation="sigmoid"), nn.Dense(10)),
    ),
    "activation layers, strides and padding": lambda: network(
        *(nn.Conv2D(7, 3, strides=2, padding=1), nn.Activation("tanh"), nn.Conv2D(33, 3)),
        *(nn.GlobalAvgPool2D(), nn.Dense(10)),
    ),
    "convolutions to the end": lambda: network(nn.Conv2D(20, 28), nn.Activation("sigmoid"), nn.Conv2D(10, 1)),
}


@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("block, examples", [(8, 100), (16, 1), (16, 65)])
def test_scores_and_gradients_are_those_of_the_plain_network(build, block, examples):
    net = build()
    X, found = nd.random.uniform(shape=(examples, 1, 28, 28)), []
    for computed in (net, tuning.tuned(net, block)):
        computed.hybridize(static_alloc=True, static_shape=True)  # as in training
        with autograd.record():
            scores = computed(X)
            loss = nd.log_softmax(scores.reshape((examples, -1)))[:, 3]
        loss.backward()
        grads = {name: p.grad().asnumpy().copy() for name, p in net.collect_params().items()}
        found.append((scores.asnumpy(), grads))
    (scores, grads), (fast_scores, fast_grads) = found
    assert fast_scores.shape == scores.shape
    # Sums of at most 800 products in each of 4 layers.
    np.testing.assert_allclose(fast_scores, scores, rtol=0, atol=4 * 800 * EPSILON * np.abs(scores).max())
    for name, grad in grads.items():  # also sums over the pixels of all images
        atol = (4 * 800 + examples * 26**2) * EPSILON * np.abs(grad).max()
        np.testing.assert_allclose(fast_grads[name], grad, rtol=0, atol=atol)


@pytest.mark.parametrize("block, channels", [(8, [(24, 1), (56, 24)]), (16, [(32, 1), (64, 32)])])
def test_the_channels_of_lenet_are_padded_to_multiples_of_the_block(block, channels):
    model = create_model("highlevel", [mx.cpu(0)])
    before = str(model.net)
    layers = [layer for layer in tuning.tuned(model.net, block) if isinstance(layer, tuning.PaddedConv2D)]
    assert [(layer.outputs, layer.inputs) for layer in layers] == channels
    assert {id(p) for layer in layers for p in layer.params.values()} <= {id(p) for p in model.parameters.values()}
    assert str(model.net) == before and "Padded" not in before


UNCHANGED = {
    "ResNet-18": (networks.resnet18, 8),
    "normalization": (lambda: network(nn.Conv2D(4, 3, groups=1), nn.BatchNorm(), nn.Dense(10)), 8),
    "groups": (lambda: network(nn.Conv2D(4, 3), nn.Conv2D(4, 3, groups=2), nn.Dense(10)), 8),
    "one layer": (lambda: nn.Dense(10), 8),
    "without vectors": (lambda: network(nn.Conv2D(20, 3), nn.Dense(10)), 1),
}


@pytest.mark.parametrize("build, block", UNCHANGED.values(), ids=UNCHANGED)
def test_a_network_that_tuning_cannot_change_is_left_as_it_is_and_one_line_says_so(build, block, capsys):
    net = build()
    tuning._say_once.cache_clear()
    assert tuning.tuned(net, block) is net and tuning.tuned(net, block) is net
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("hybridize", [True, False])
@pytest.mark.filterwarnings("ignore:Cannot decide type")
def test_a_tuned_model_has_the_arrays_and_the_exported_graph_of_the_lesson(hybridize, monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "channel_block", lambda: 8)
    config, graphs = Config("highlevel", hybridize=hybridize), []
    fast = create_model("highlevel", [mx.cpu(0), mx.cpu(1)], Config("highlevel", hybridize=hybridize, tune=True))
    plain = create_model("highlevel", [mx.cpu(0), mx.cpu(1)], config)
    assert any(isinstance(layer, tuning.PaddedConv2D) for layer in fast.net)
    assert {name: p.shape for name, p in fast.arrays(1).items()} == {n: p.shape for n, p in plain.arrays(1).items()}
    for i, model in enumerate((fast, plain)):
        model.step(nd.ones((8, 1, 28, 28)), nd.zeros(8), 0.1)
        model.export(str(tmp_path / str(i)))
        graphs.append((tmp_path / f"{i}-symbol.json").read_text())
    assert graphs[0] == graphs[1]
