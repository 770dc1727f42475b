"""Tuning changes how a network is computed, but not the results: compares the tuned network with the original."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

from gluon_mgpu import highlevel, networks
from gluon_mgpu.training import tuning
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import create_model

PLAN = (16, 64)  # block, piece
PLANS = [PLAN, (1, 64), (16, 0), (1, 0)]
EPS = float(np.finfo(np.float32).eps)


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
@pytest.mark.parametrize("plan, examples", [*((PLAN, n) for n in (1, 64, 65, 128, 300)), *((p, 100) for p in PLANS)])
def test_scores_and_gradients_are_the_plain_networks_to_rounding(build, plan, examples):
    net = build()
    fast = tuning.tuned(net, *plan)
    X, found = nd.random.uniform(shape=(examples, 1, 28, 28)), []
    for computed in (net, fast):
        with autograd.record():
            scores = computed(X)
            loss = nd.log_softmax(scores.reshape((examples, -1)))[:, 3]
        loss.backward()
        grads = {name: p.grad().asnumpy().copy() for name, p in net.collect_params().items()}
        found.append((scores.asnumpy(), grads))
    (scores, grads), (fast_scores, fast_grads) = found
    assert fast_scores.shape == scores.shape
    # Sums of at most 800 products in each of 4 layers.
    np.testing.assert_allclose(fast_scores, scores, rtol=0, atol=4 * 800 * EPS * np.abs(scores).max())
    for name, grad in grads.items():  # also sums over the pixels of all images
        atol = (4 * 800 + examples * 26**2) * EPS * np.abs(grad).max()
        np.testing.assert_allclose(fast_grads[name], grad, rtol=0, atol=atol)


def test_the_parameters_are_the_plain_networks_own_and_the_plain_network_is_unchanged():
    net = create_model("highlevel", [mx.cpu(0)]).net
    before = str(net)
    fast = tuning.tuned(net, *PLAN)
    assert {id(p) for p in fast.collect_params().values()} == {id(p) for p in net.collect_params().values()}
    assert str(net) == before and "Padded" not in before
    assert fast(nd.ones((200, 1, 28, 28))).shape == (200, 10)


def test_other_networks_are_left_alone():
    with_normalization = network(nn.Conv2D(4, 3, groups=1), nn.BatchNorm(), nn.Dense(10))
    in_groups = network(nn.Conv2D(4, 3), nn.Conv2D(4, 3, groups=2), nn.Dense(10))
    for net in (networks.resnet18(), with_normalization, in_groups, gluon.nn.Dense(10)):
        assert not tuning.tunable(net, [mx.cpu(0)])


AVX512 = "fpu avx2 avx512f avx512bw"
PROCESSORS = [(AVX512, (None, "ALL", "AVX512_CORE"), True), (AVX512, ("AVX2", "SSE41"), False), ("fpu", (None,), False)]


@pytest.mark.parametrize("flags, limits, expected", PROCESSORS)
def test_with_tune_networks_are_tuned_if_onednn_uses_avx_512(flags, limits, expected, monkeypatch):
    monkeypatch.setattr(tuning.Path, "read_text", lambda _: f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    for isa in limits:
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", isa or "")
        if not isa:
            monkeypatch.delenv("DNNL_MAX_CPU_ISA")
        assert tuning.has_avx512() == expected
    for tune in (True, False):
        model = create_model("highlevel", [mx.cpu(0), mx.cpu(1)], Config(impl="highlevel", tune=tune))
        assert isinstance(model.net, tuning.InPieces) == (tune and expected)
        assert isinstance(model.trainer, tuning.Trainer) == tune
        assert (model.lesson.loss is highlevel.loss) != tune and not highlevel.loss._active


def dense(ctx):
    net = nn.Dense(6, in_units=5)
    net.initialize(ctx=ctx)
    return net


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_fast_trainer_takes_the_steps_of_gluons_trainer_and_keeps_all_replicas_equal(k, momentum):
    ctx, rule = [mx.cpu(i) for i in range(k)], {"learning_rate": 0.3, "momentum": momentum, "wd": 0.01}
    net, plain = dense(ctx), dense(ctx)
    for p, q in zip(plain.collect_params().values(), net.collect_params().values()):
        p.set_data(q.data(ctx[0]))
    trainers = [
        tuning.Trainer([*net.collect_params().values()], rule),
        gluon.Trainer(plain.collect_params(), "sgd", rule, kvstore="device", update_on_kvstore=False),
    ]
    for seed in range(3):
        X = np.random.default_rng(seed).standard_normal((k, 4, 5)).astype(np.float32)
        for model, trainer in zip((net, plain), trainers):
            with autograd.record():
                losses = [(model(nd.array(x, c)) ** 2).sum() for x, c in zip(X, ctx)]
            autograd.backward(losses)
            trainer.step(4 * k)
    for p, q in zip(net.collect_params().values(), plain.collect_params().values()):
        for c in ctx:
            np.testing.assert_array_equal(p.data(c).asnumpy(), p.data(ctx[0]).asnumpy())
        # Each step adds the rounding errors of a sum over 4k examples and k contexts, of an update, and of their effect
        # on the next gradients: about 10 roundings per example. The values stay of the size of the first ones.
        atol = 3 * 10 * 4 * k * EPS * max(1, np.abs(q.data(ctx[0]).asnumpy()).max())
        np.testing.assert_allclose(p.data(ctx[0]).asnumpy(), q.data(ctx[0]).asnumpy(), rtol=0, atol=atol)


def test_a_tuned_model_has_a_loss_of_its_own_and_draws_no_more_than_the_lesson():
    fast, plain = (create_model("highlevel", [mx.cpu()], Config("highlevel", tune=tune)) for tune in (True, False))
    assert fast.lesson.loss is not highlevel.loss
    assert fast.draws is plain.draws is False
