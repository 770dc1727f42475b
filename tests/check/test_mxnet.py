"""Holding a lesson against one device: wrong steps are named, right ones are not accused."""

import functools
import importlib
import shutil
from itertools import count
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner
from mxnet import gluon, nd
from mxnet.gluon import nn

from gluon_mgpu import highlevel, scratch, train
from gluon_mgpu.check.mxnet import compare
from gluon_mgpu.commands.check import check
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.training import lessons

CPUS = [mx.cpu(i) for i in range(3)]


def mean(data):
    scratch.allreduce(data)
    for array in data:
        array /= len(data)


def mean_loss(y_hat, y):
    return -nd.pick(nd.log_softmax(y_hat), y).mean()


def tree(data):
    distance = 1
    while distance < len(data):
        for i in range(0, len(data) - distance, 2 * distance):
            data[i][:] += data[i + distance].copyto(data[i].context)
        distance *= 2
    for other in data[1:]:
        data[0].copyto(other)


def with_leftovers(buffers):
    def allreduce(data):
        total = buffers.setdefault(data[0].shape, nd.zeros(data[0].shape))
        for d in data:
            total += d.as_in_context(total.context)
        for d in data:
            total.copyto(d)

    return allreduce


def drop(data, ctx):
    n = data.shape[0] // len(ctx)
    return [data[i * n : (i + 1) * n].as_in_context(c) for i, c in enumerate(ctx)]


def interleaved(data, ctx):
    return [data[i :: len(ctx)].as_in_context(c) for i, c in enumerate(ctx)]


def size(X, Xs):
    return X.shape[0]


def array_step(labels=lambda ys: ys, divisor=size, norm=None, devices=lambda ctx: ctx, rate=lambda lr, ctx: lr):
    def train_batch(X, y, device_params, ctx, lr):
        ctx, lr = devices(ctx), rate(lr, ctx)
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


def not_split(X, y, device_params, ctx, lr):
    Xs, ys = scratch.split_and_load(X, ctx), [y.as_in_context(c) for c in ctx]
    losses = scratch.forward_backward(device_params, Xs, ys)
    for params in device_params:
        scratch.sgd(params, lr, X.shape[0])
    return losses


def on_cpu_0(params, ctx):
    return scratch.get_params(params, mx.cpu(0))


def of_the_first_shard(data_iter, net, ctx):
    shards = [(scratch.split_and_load(X, ctx)[0], scratch.split_and_load(y, ctx)[0]) for X, y in data_iter]
    hits = [(net(X).argmax(axis=1) == y).mean().asscalar() for X, y in shards]
    return sum(hits) / len(hits)


def filled_once(buffers):
    def split_and_load(data, ctx):
        shards = scratch.split_and_load(data, ctx)
        return [buffers.setdefault((shard.context, shard.shape), shard) for shard in shards]

    return split_and_load


def rounded(X, y, net, ctx, trainer):
    losses = highlevel.forward_backward(net, highlevel.split_and_load(X, ctx), highlevel.split_and_load(y, ctx))
    for p in net.collect_params().values():
        for g in p.list_grad():
            g[:] = g.astype("float16").astype("float32")
    trainer.step(X.shape[0])
    return losses


def rebinding(params, lr, batch_size):
    for p in params:
        p = p - lr * p.grad / batch_size


def clipped_sum(X, y, net, ctx, trainer):
    losses = highlevel.forward_backward(net, highlevel.split_and_load(X, ctx), highlevel.split_and_load(y, ctx))
    trainer.allreduce_grads()
    for c in ctx:
        grads = [p.grad(c) for p in net.collect_params().values() if p.grad_req != "null"]
        gluon.utils.clip_global_norm(grads, 0.1 * X.shape[0])
    trainer.update(X.shape[0])
    return losses


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


def part_lost(X, y, device_params, ctx, lr):
    losses = scratch.forward_backward(device_params, scratch.split_and_load(X, ctx), scratch.split_and_load(y, ctx))
    for params in device_params[1:]:
        params[0].grad[0] = 0
    for i in range(len(device_params[0])):
        scratch.allreduce([params[i].grad for params in device_params])
    for params in device_params:
        scratch.sgd(params, lr, X.shape[0])
    return losses


def losses_after(X, y, device_params, ctx, lr):
    scratch.train_batch(X, y, device_params, ctx, lr)
    shards = zip(scratch.split_and_load(X, ctx), scratch.split_and_load(y, ctx), device_params)
    return [scratch.loss(scratch.lenet(X, params), y) for X, y, params in shards]


def means(X, y, device_params, ctx, lr):
    return [losses.mean() for losses in scratch.train_batch(X, y, device_params, ctx, lr)]


def rebinding_list(params, lr, batch_size):
    params[:] = [p - lr * p.grad / batch_size for p in params]


def with_replacement(data, ctx):
    return scratch.split_and_load(nd.concat(data[:-2], data[:2], dim=0), ctx)


# {mistake: (lesson, functions that replace its own, (the claim that does not hold, a word of the reason))}
WRONG = {
    "a mean loss": ("scratch", {"loss": mean_loss}, ("update", "computes the mean loss of its shard")),
    "mean instead of sum": ("scratch", {"allreduce": mean}, ("update", "0.33333 times")),
    "divided by the shard's size": (
        "scratch",
        {"train_batch": array_step(divisor=lambda X, Xs: len(Xs[0]))},
        ("update", "shard"),
    ),
    "a part of a gradient lost": ("scratch", {"train_batch": part_lost}, ("sum", "9 of 180 elements of W1")),
    "last examples dropped": ("scratch", {"split_and_load": drop}, ("devices", "drops")),
    "the first shard's accuracy": ("scratch", {"evaluate_accuracy": of_the_first_shard}, ("accuracy", "once")),
    "losses after the update": ("scratch", {"train_batch": losses_after}, ("losses", "changed")),
    "mean losses": ("scratch", {"train_batch": means}, ("losses", "for each")),
    "new arrays without gradients": ("scratch", {"sgd": rebinding_list}, ("runs", "attach_grad")),
    "examples twice": ("scratch", {"split_and_load": with_replacement}, ("devices", "once")),
    "labels of other images": ("scratch", {"train_batch": array_step(rotated)}, ("losses", "label")),
    "shards of earlier batches": ("scratch", lambda: {"split_and_load": filled_once({})}, ("devices", "earlier")),
    "another rate on each device": ("scratch", lambda: {"sgd": counting(count())}, ("replicas", "only the step of")),
    "lr to the power of the devices": (
        "scratch",
        {"train_batch": array_step(rate=lambda lr, ctx: lr ** len(ctx))},
        ("update", "learning rate"),
    ),
    "a new array instead of an update": ("scratch", {"sgd": rebinding}, ("update", "in place")),
    "update before backward": ("scratch", {"train_batch": update_first}, ("update", "earlier batch")),
    "sums of earlier calls": ("scratch", lambda: {"allreduce": with_leftovers({})}, ("update", "earlier")),
    "the first device k times": (
        "scratch",
        {"train_batch": array_step(devices=lambda ctx: ctx[:1] * len(ctx))},
        ("devices", "no examples"),
    ),
    "all replicas on cpu(0)": ("scratch", {"get_params": on_cpu_0}, ("devices", "is on cpu(0)")),
    "nan": ("scratch", {"loss": lambda y_hat, y: y_hat[:, 0] * float("nan")}, ("runs", "nan")),
    "labels not split": ("scratch", {"train_batch": not_split}, ("several", "split the labels")),
    "Gluon, initialized on one device": (
        "highlevel",
        {"initialize": lambda net, ctx: net.initialize(ctx=ctx[0])},
        ("several", "initialize"),
    ),
    "Gluon, gradients in float16": ("highlevel", {"train_batch": rounded}, ("update", "float16")),
    "no sum": ("scratch", {"allreduce": lambda data: None}, ("sum", "own gradients")),
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
    "interleaved shards": ("scratch", {"split_and_load": interleaved}),
    "clipping": ("scratch", {"train_batch": array_step(norm=1.0)}),
    "batch normalization": ("highlevel", {"lenet": network(nn.BatchNorm)}),
    "batch normalization, the sum clipped": (
        "highlevel",
        {"lenet": network(nn.BatchNorm), "train_batch": clipped_sum},
    ),
    "dropout": ("highlevel", {"lenet": network(lambda: nn.Dropout(0.5))}),
    "a Gluon step": ("highlevel", {"train_batch": gluon_step(size)}),
}


def fresh(impl, functions):
    """A function that returns a lesson with other functions; those with closures are made anew each time."""
    return lambda: lessons.load(impl, **(functions() if callable(functions) else functions))


FAST = 6  # the first rows are in the normal suite


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i >= FAST)) for i, name in enumerate(WRONG)]
)
def test_a_wrong_step_is_named(name):
    impl, functions, (claim, word) = WRONG[name]
    report = compare(fresh(impl, functions), CPUS)
    assert word in report.claims[claim]
    assert word in report.verdict


@pytest.mark.slow
@pytest.mark.parametrize("name, devices", [*((name, 3) for name in RIGHT), ("scratch", 2), ("highlevel", 2)])
def test_a_right_step_is_not_accused(name, devices):
    impl, functions = RIGHT[name]
    report = compare(fresh(impl, functions), CPUS[:devices])
    assert report.claims.keys() >= {"losses", "replicas", "update"} and not any(report.claims.values())
    assert report.how == {
        "dropout": ["with dropout off"],
        "batch normalization": ["batch normalization of the examples of each device"],
        "batch normalization, the sum clipped": ["batch normalization of the examples of each device"],
    }.get(name, [])
    assert functions or ("distance" in " ".join(report.notes)) == (impl != "sharded")


SUMS = """
sums, original = {}, get_params


def get_params(params, ctx):
    sums.update({p.shape: nd.zeros_like(p) for p in params})
    return original(params, ctx)


def allreduce(data):
    total = sums[data[0].shape]
    total[:] = 0
    for d in data:
        total += d.as_in_context(total.context)
    for d in data:
        total.copyto(d)


original_step = train_batch


def train_batch(X, *args):
    assert X.shape[0] >= 10, "a batch needs ten examples"
    return original_step(X, *args)
"""


def test_a_lesson_may_create_arrays_for_allreduce_and_need_batches_of_ten(tmp_path):
    (tmp_path / "sums.py").write_text(Path(scratch.__file__).read_text() + SUMS)
    assert compare(str(tmp_path / "sums.py"), CPUS[:2]).verdict == ""


class Nothing:
    def __call__(self, data):
        pass


REPLACED = [functools.partial(lambda data: None), Nothing(), functools.wraps(scratch.allreduce)(lambda data: None)]


@pytest.mark.parametrize("allreduce", REPLACED, ids=["partial", "object", "wrapper"])
def test_a_replacement_that_is_no_plain_function_is_checked(allreduce):
    assert "own gradients" in compare(lessons.load("scratch", allreduce=allreduce), CPUS[:2]).verdict


LOGGED = """
import functools


def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


allreduce = logged(allreduce)
"""


def test_a_decorated_function_that_replaces_another_one_with_the_same_decorator_is_checked(tmp_path):
    (tmp_path / "own.py").write_text(Path(scratch.__file__).read_text() + LOGGED)
    lesson = lessons.load(str(tmp_path / "own.py"))
    assert compare(lesson, CPUS[:2]).verdict == ""
    lesson.allreduce = lesson.logged(lambda data: None)
    assert "own gradients" in compare(lesson, CPUS[:2]).verdict


@pytest.mark.parametrize("by", [lessons.load, lambda path: importlib.import_module(Path(path).stem)])
def test_a_lesson_may_keep_values_between_steps(by, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"momentum_{by.__name__.strip('<>')}.py"
    file.write_text(Path(scratch.__file__).read_text() + MOMENTUM)
    lesson = by(str(file))
    assert compare(lesson, CPUS).verdict == "" and lesson.velocities == {}


def test_what_is_checked_is_what_runs(tmp_path, monkeypatch):
    """A module that was imported and then patched is not loaded again."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "patched_lesson.py").write_text(Path(scratch.__file__).read_text())
    lesson = importlib.import_module("patched_lesson")
    assert compare(lesson, CPUS).verdict == ""
    lesson.allreduce = mean
    assert "0.33333 times" in compare(lesson, CPUS).verdict


def test_functions_that_are_not_called_are_named(tmp_path):
    file = tmp_path / "star.py"
    file.write_text("from gluon_mgpu.scratch import *\n\n\ndef allreduce(data):\n    pass\n")
    report = compare(lessons.load(str(file)), CPUS)
    assert "allreduce is not called" in report.verdict
    own_step = compare(lessons.load("highlevel", split_and_load=drop, train_batch=gluon_step(size)), CPUS)
    assert "split_and_load is not called" in own_step.verdict


@pytest.mark.slow
def test_the_command_takes_the_shape_of_your_own_data(tmp_path):
    parts = {"images": np.zeros((9, 3, 20, 20), np.uint8), "labels": np.arange(9, dtype=np.uint8) % 4}
    np.savez(tmp_path / "data.npz", **{f"{of}_{part}": a for of in ("train", "test") for part, a in parts.items()})
    (tmp_path / "rgb.py").write_text(Path(highlevel.__file__).read_text().replace("nn.Dense(10)", "nn.Dense(4)"))
    words = [str(tmp_path / "rgb.py"), "--device", "cpu", "--dataset", "own", "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(check, words, standalone_mode=False)
    assert result.exit_code == 0 and result.output.endswith("takes the same step as on one device\n")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["sharded --zero 3", "highlevel --tune", "highlevel --no-hybridize"])
def test_the_command_checks_the_step_that_the_settings_choose(words):
    result = CliRunner().invoke(check, [*words.split(), "--device", "cpu"], standalone_mode=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("words", ["highlevel --zero 3", "scratch --data-dir anywhere", "scratch --dataset mnist"])
def test_the_command_refuses_settings_that_it_would_ignore(words):
    result = CliRunner().invoke(check, [*words.split(), "--device", "cpu"])
    assert result.exit_code == UsageError.exit_status


def test_an_own_lesson_is_compared_before_training_and_named_again_at_the_end(capsys):
    options = {"gpus": 2, "dataset": "synthetic", "limit": 100, "batch_size": 20, "epochs": 1, "seed": 1}
    train(impl=lessons.load("scratch", allreduce=mean), **options)
    wrong = capsys.readouterr().err.splitlines()
    train(impl=lessons.load("scratch", allreduce=tree), **options)
    right = capsys.readouterr().err
    assert len([line for line in wrong if "0.5 times" in line]) == 2 and "0.5 times" in wrong[-1]
    assert "one device" not in right


@pytest.mark.slow
def test_checking_a_lesson_of_ones_own_does_not_change_its_training(tmp_path):
    own = shutil.copy(scratch.__file__, tmp_path / "own.py")
    options = {"gpus": 2, "dataset": "synthetic", "limit": 100, "batch_size": 20, "epochs": 1, "seed": 1}
    losses = [train(impl=str(impl), **options)[-1].train_loss for impl in ("scratch", own)]
    assert losses[0] == losses[1]
