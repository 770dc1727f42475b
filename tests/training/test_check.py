"""Holding a lesson against one device: wrong steps are named, right ones are not accused."""

import importlib
from itertools import count
from pathlib import Path

import mxnet as mx
import pytest
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

from gluon_mgpu import highlevel, scratch, train
from gluon_mgpu.check.comparison import verdict
from gluon_mgpu.training import lessons
from gluon_mgpu.training.check import compare

CPUS = [mx.cpu(i) for i in range(3)]


def half(data):
    n = (data[0].shape[0] + 1) // 2
    for other in data[1:]:
        data[0][:n] += other[:n].copyto(data[0].context)
    for other in data[1:]:
        data[0].copyto(other)


def mean(data):
    scratch.allreduce(data)
    for array in data:
        array /= len(data)


def first(data):
    for other in data[1:]:
        data[0].copyto(other)


def not_back(data):
    for other in data[1:]:
        data[0][:] += other.copyto(data[0].context)


def tree(data):
    distance = 1
    while distance < len(data):
        for i in range(0, len(data) - distance, 2 * distance):
            data[i][:] += data[i + distance].copyto(data[i].context)
        distance *= 2
    for other in data[1:]:
        data[0].copyto(other)


def from_the_last(data):
    scratch.allreduce(data[::-1])


def drop(data, ctx):
    n = data.shape[0] // len(ctx)
    return [data[i * n : (i + 1) * n].as_in_context(c) for i, c in enumerate(ctx)]


def same(data, ctx):
    return [data[: data.shape[0] // len(ctx)].as_in_context(c) for c in ctx]


def whole(data, ctx):
    return [data.as_in_context(c) for c in ctx]


def interleaved(data, ctx):
    return [data[i :: len(ctx)].as_in_context(c) for i, c in enumerate(ctx)]


def size(X, Xs):
    return X.shape[0]


def array_step(labels=lambda ys: ys, divisor=size, norm=None):
    def train_batch(X, y, device_params, ctx, lr):
        Xs, ys = scratch.split_and_load(X, ctx), labels(scratch.split_and_load(y, ctx))
        losses = scratch.forward_backward(device_params, Xs, ys)
        for i in range(len(device_params[0])):
            scratch.allreduce([params[i].grad for params in device_params])
        for params in device_params:
            if norm:
                gluon.utils.clip_global_norm([p.grad for p in params], norm * X.shape[0])
            scratch.sgd(params, lr, divisor(X, Xs))
        return losses

    return train_batch


def drawn(params, ctx):
    return scratch.get_params([nd.random.normal(shape=p.shape) for p in params], ctx)


def added(params, ctx):
    params = scratch.get_params(params, ctx)
    for p in params:
        p.attach_grad("add")
    return params


def filled_once(buffers):
    def split_and_load(data, ctx):
        shards = scratch.split_and_load(data, ctx)
        return [buffers.setdefault((shard.context, shard.shape), shard) for shard in shards]

    return split_and_load


def of_the_first(device_params, Xs, ys):
    with autograd.record():
        replicas = [[p.as_in_context(X.context) for p in device_params[0]] for X in Xs]
        losses = [scratch.loss(scratch.lenet(X, params), y) for X, y, params in zip(Xs, ys, replicas)]
    for shard_loss in losses:
        shard_loss.backward()
    return losses


def mean_of_means(net, data, label):
    with autograd.record():
        losses = [highlevel.loss(net(X), y) for X, y in zip(data, label)]
        means = [shard_loss.mean() for shard_loss in losses]
    autograd.backward(means)
    return losses


def hinge(net, data, label):
    with autograd.record():
        scores = [net(X) for X in data]
        losses = [nd.relu(1 + s - nd.pick(s, y, keepdims=True)).sum(axis=1) for s, y in zip(scores, label)]
    autograd.backward(losses)
    return losses


def rebinding(params, lr, batch_size):
    for p in params:
        p = p - lr * p.grad / batch_size


def counting(calls):
    def sgd(params, lr, batch_size):
        scratch.sgd(params, lr * 0.9 ** next(calls), batch_size)

    return sgd


def update_first(X, y, device_params, ctx, lr):
    for params in device_params:
        scratch.sgd(params, lr, X.shape[0])
    losses = scratch.forward_backward(device_params, scratch.split_and_load(X, ctx), scratch.split_and_load(y, ctx))
    for i in range(len(device_params[0])):
        scratch.allreduce([params[i].grad for params in device_params])
    return losses


def clipped(net, data, label):
    losses = highlevel.forward_backward(net, data, label)
    for X in data:
        gluon.utils.clip_global_norm([p.grad(X.context) for p in net.collect_params().values()], 1.0)
    return losses


def not_summing(X, y, net, ctx, trainer):
    losses = highlevel.forward_backward(net, highlevel.split_and_load(X, ctx), highlevel.split_and_load(y, ctx))
    trainer.update(X.shape[0])
    return losses


def gluon_step(divisor, forward_backward=highlevel.forward_backward):
    def train_batch(X, y, net, ctx, trainer):
        data, label = highlevel.split_and_load(X, ctx), highlevel.split_and_load(y, ctx)
        losses = forward_backward(net, data, label)
        trainer.step(divisor(X, data))
        return losses

    return train_batch


def network(*layers):
    def lenet():
        net = nn.HybridSequential()
        net.add(nn.Conv2D(8, 3), *[layer() for layer in layers], nn.GlobalAvgPool2D(), nn.Dense(10))
        return net

    return lenet


def rotated(ys):
    return [nd.concat(y[1:], y[:1], dim=0) for y in ys]


def of_shard(X, Xs):
    return Xs[0].shape[0]


# {mistake: (lesson, functions that replace its own, (the claim that does not hold, a word of the reason))}
WRONG = {
    "half of each array summed": ("scratch", {"allreduce": half}, ("sum", "part")),
    "mean instead of sum": ("scratch", {"allreduce": mean}, ("sum", "divides")),
    "first device's gradients for all": ("scratch", {"allreduce": first}, ("sum", "first")),
    "sum on the first device only": ("scratch", {"allreduce": not_back}, ("replicas", "")),
    "divided by the shard's size": ("scratch", {"train_batch": array_step(divisor=of_shard)}, ("update", "shard")),
    "labels of other images": ("scratch", {"train_batch": array_step(rotated)}, ("losses", "label")),
    "last examples dropped": ("scratch", {"split_and_load": drop}, ("split", "drops")),
    "same shard on all": ("scratch", {"split_and_load": same}, ("split", "same")),
    "whole batch on all": ("scratch", {"split_and_load": whole}, ("split", "whole")),
    "Gluon, divided by the shard's size": ("highlevel", {"train_batch": gluon_step(of_shard)}, ("update", "shard")),
    "Gluon, last examples dropped": ("highlevel", {"split_and_load": drop}, ("split", "drops")),
    "Gluon, same shard on all": ("highlevel", {"split_and_load": same}, ("split", "same")),
    "Gluon, whole batch on all": ("highlevel", {"split_and_load": whole}, ("split", "whole")),
    "each replica drawn anew": ("scratch", {"get_params": drawn}, ("start", "start")),
    "gradients of earlier steps": ("scratch", {"get_params": added}, ("update", "leaves")),
    "shards of earlier batches": ("scratch", {"split_and_load": filled_once({})}, ("split", "earlier")),
    "the first replica on all": ("scratch", {"forward_backward": of_the_first}, ("update", "only")),
    "a new array instead of an update": ("scratch", {"sgd": rebinding}, ("update", "in place")),
    "another rate on each device": ("scratch", {"sgd": counting(count())}, ("replicas", "equal gradients")),
    "update before backward": ("scratch", {"train_batch": update_first}, ("losses", "changed")),
    "Gluon, a mean of means": (
        "highlevel",
        {"train_batch": gluon_step(lambda X, Xs: len(Xs), mean_of_means)},
        ("update", "sizes"),
    ),
    "Gluon, a mean of each device's losses": (
        "highlevel",
        {"forward_backward": lambda *args: [shard.mean() for shard in highlevel.forward_backward(*args)]},
        ("losses", "each example"),
    ),
    "Gluon, no sum": ("highlevel", {"train_batch": not_summing}, ("replicas", "different gradients")),
    "Gluon, shards clipped": ("highlevel", {"train_batch": gluon_step(size, clipped)}, ("update", "clip")),
}
MOMENTUM = """
velocities = {}


def sgd(params, lr, batch_size):
    for i, p in enumerate(params):
        v = velocities.setdefault((i, p.context), nd.zeros_like(p))
        v[:] = 0.9 * v + p.grad / batch_size
        p[:] -= lr * v
"""
RIGHT = {
    "scratch": ("scratch", {}),
    "highlevel": ("highlevel", {}),
    "sharded": ("sharded", {}),
    "a tree": ("scratch", {"allreduce": tree}),
    "a sum on the last device": ("scratch", {"allreduce": from_the_last}),
    "interleaved shards": ("scratch", {"split_and_load": interleaved}),
    "clipping": ("scratch", {"train_batch": array_step(norm=1.0)}),
    "an own step": ("scratch", {"train_batch": array_step()}),
    "another network": ("highlevel", {"lenet": network(lambda: nn.Activation("relu"))}),
    "batch normalization": ("highlevel", {"lenet": network(nn.BatchNorm)}),
    "another loss": ("highlevel", {"train_batch": gluon_step(size, hinge)}),
    "a Gluon step": ("highlevel", {"train_batch": gluon_step(size)}),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_named(name, devices):
    impl, functions, (claim, word) = WRONG[name]
    claims = compare(lessons.load(impl, **functions), CPUS[:devices])
    assert word in claims[claim]
    assert word in verdict(claims)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_not_accused(name, devices):
    impl, functions = RIGHT[name]
    claims = compare(lessons.load(impl, **functions), CPUS[:devices])
    assert claims.keys() >= {"losses", "replicas", "update"} and not any(claims.values())


@pytest.mark.parametrize("by", [lessons.load, lambda path: importlib.import_module(Path(path).stem)])
def test_a_lesson_may_keep_values_between_steps(by, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"momentum_{by.__name__.strip('<>')}.py"
    file.write_text(Path(scratch.__file__).read_text() + MOMENTUM)
    lesson = by(str(file))
    assert verdict(compare(lesson, CPUS)) == "" and lesson.velocities == {}


def test_a_step_with_dropout_is_not_compared():
    lesson = lessons.load("highlevel", lenet=network(lambda: nn.Dropout(0.5)))
    claims = compare(lesson, CPUS[:2])
    assert [*claims] == ["repeatable"] and "cannot be compared" in verdict(claims)


def test_an_own_lesson_is_compared_before_training_and_named_again_at_the_end(capsys):
    options = {"gpus": 2, "dataset": "synthetic", "limit": 100, "batch_size": 20, "epochs": 1, "seed": 1}
    train(impl=lessons.load("scratch", allreduce=mean), **options)
    wrong = capsys.readouterr().err.splitlines()
    train(impl=lessons.load("scratch", allreduce=tree), **options)
    right = capsys.readouterr().err
    assert len([line for line in wrong if "allreduce divides" in line]) == 2 and "allreduce divides" in wrong[-1]
    assert "one device" not in right


def test_checking_does_not_change_training():
    options = {"gpus": 2, "dataset": "synthetic", "limit": 100, "batch_size": 20, "epochs": 1, "seed": 1}
    losses = [train(impl="scratch", check=check, **options)[-1].train_loss for check in (False, True)]
    assert losses[0] == losses[1]
