"""Holding a lesson against one device: wrong steps are named, right ones are not accused."""

import mxnet as mx
import pytest
from mxnet import gluon, nd
from mxnet.gluon import nn

from gluon_mgpu import equivalence, highlevel, lessons, scratch
from gluon_mgpu.train import train

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


def array_step(labels=lambda ys: ys, divisor=lambda X, Xs: X.shape[0], norm=None):
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


def gluon_step(divisor):
    def train_batch(X, y, net, ctx, trainer):
        data, label = highlevel.split_and_load(X, ctx), highlevel.split_and_load(y, ctx)
        losses = highlevel.forward_backward(net, data, label)
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
}
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
    "a Gluon step": ("highlevel", {"train_batch": gluon_step(lambda X, Xs: X.shape[0])}),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_named(name, devices):
    impl, functions, (claim, word) = WRONG[name]
    claims = equivalence.compare(lessons.load(impl, **functions), CPUS[:devices])
    assert word in next(c.reason for c in claims if c.name == claim)
    assert word in equivalence.verdict(claims)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_not_accused(name, devices):
    impl, functions = RIGHT[name]
    claims = equivalence.compare(lessons.load(impl, **functions), CPUS[:devices])
    assert [claim for claim in claims if claim.reason] == []


def test_a_step_with_dropout_is_not_compared():
    lesson = lessons.load("highlevel", lenet=network(lambda: nn.Dropout(0.5)))
    claims = equivalence.compare(lesson, CPUS[:2])
    assert [claim.name for claim in claims] == ["repeatable"] and "cannot be compared" in equivalence.verdict(claims)


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
