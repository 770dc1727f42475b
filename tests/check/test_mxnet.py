"""Holding a lesson against one device: wrong steps are named, right ones are not accused."""

import functools
import importlib
import shutil
import textwrap
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from click.testing import CliRunner

from gluon_mgpu import highlevel, scratch, train
from gluon_mgpu.check.judge import UNKNOWN
from gluon_mgpu.check.mxnet import compare_lesson
from gluon_mgpu.commands.check import check
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.training import lessons
from gluon_mgpu.training.models import GluonModel

CPUS = [mx.cpu(i) for i in range(3)]
TEXTS = {module: Path(module.__file__).read_text() for module in (scratch, highlevel)}

# Lines of the lessons
SPLIT = "    Xs, ys = split_and_load(X, ctx), split_and_load(y, ctx)\n"
BACKWARD = "    losses = forward_backward(device_params, Xs, ys)\n"
UPDATE = """    for params in device_params:  # the same update on each device keeps the replicas equal
        sgd(params, lr, X.shape[0])
"""
RETURN = "    return losses\n\n\ndef evaluate_accuracy"
LOSS = "-nd.pick(nd.log_softmax(y_hat), y)"
SGD = "nd.sgd_update(p, p.grad, out=p, lr=lr, rescale_grad=1 / batch_size)"
SUM = """    for i in range(1, len(data)):
        data[0][:] += data[i].copyto(data[0].context)
"""
STEP = "    trainer.step(X.shape[0])"

SHARDS = "    return shards\n"
TRAINER = "update_on_kvstore=False"

# What replaces or follows them
REVERSED = """    if data.ndim == 1:
        shards = [shards[0][::-1], *shards[1:]]
"""
SUM_BY_HAND = """    for p in net.collect_params().values():
        total = nd.add_n(*[g.as_in_context(ctx[0]) for g in p.list_grad()])
        for g in p.list_grad():
            total.copyto(g)
"""
PART_LOST = """    for params in device_params[1:]:
        params[0].grad[0] = 0
"""
LOSSES_AFTER = (
    "    return [loss(lenet(X, params), y) for X, y, params in zip(Xs, ys, device_params)]\n\n\ndef evaluate_accuracy"
)
LEFTOVERS = """    total = totals.setdefault(data[0].shape, nd.zeros(data[0].shape))
    for array in data:
        total += array.as_in_context(total.context)
    total.copyto(data[0])
"""
IN_FLOAT16 = """    for p in net.collect_params().values():
        for g in p.list_grad():
            g[:] = g.astype("float16").astype("float32")
"""
OF_8_BITS = """    for p in net.collect_params().values():
        for g in p.list_grad():
            unit = g.abs().max() / 127
            g[:] = (g / unit).round() * unit
"""
IN_PARTS = """    for array in sum(device_params, []):
        array.grad[:] = 0
    losses = []
    for i in range(2):
        losses += forward_backward(device_params, [X[i::2] for X in Xs], [y[i::2] for y in ys])
"""
SUM_GRADIENTS = """    for i in range(len(device_params[0])):
        allreduce([params[i].grad for params in device_params])
"""
SUMMED_STATISTICS = """
    for p in net.collect_params(".*running.*").values():
        p.set_data(nd.add_n(*[a.as_in_context(ctx[0]) for a in p.list_data()]))
"""
DECAY = """    for p in net.collect_params(".*weight").values():
        for a, g in zip(p.list_data(), p.list_grad()):
            g += 2 * a
"""
SKIP = """    for params, shard_losses in zip(device_params, losses):
        if np.isnan(shard_losses.asnumpy()).any():
            continue
        sgd(params, lr, X.shape[0])
"""
CRITIC = """    critic.initialize(ctx=ctx)
    trainers.append(gluon.Trainer(critic.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=KVSTORE))
    trainer = gluon"""
OF_CRITIC = (
    ("loss = gluon", "critic, trainers = nn.Dense(1, in_units=10), []\nloss = gluon"),
    ("loss(net(X), y) for", "loss(a := net(X), y) + 0.02 * (critic(a)[:, 0] - y) ** 2 for"),
    (STEP, f"    trainers[0].step(X.shape[0])\n{STEP}"),
)
BY_HAND = """    critic.initialize(ctx=ctx)
    critics.extend([p.data(c) for p in critic.collect_params().values()] for c in ctx)
    trainer = gluon"""
UPDATE_BY_HAND = """    for params in critics:
        for p in params:
            p -= 0.01 * p.grad / X.shape[0]
"""
SUM_OF_CRITICS = """    for gradients in zip(*([p.grad for p in params] for params in critics)):
        total = nd.add_n(*[g.as_in_context(ctx[0]) for g in gradients])
        for g in gradients:
            total.copyto(g)
"""
HAND_MADE = (
    ("loss = gluon", "critic, critics = nn.Dense(1, in_units=10), []\nloss = gluon"),
    ("loss(net(X), y) for", "loss(a := net(X), y) + 0.02 * (critic(a)[:, 0] - y) ** 2 for"),
    ("    trainer = gluon", BY_HAND),
)
DEFERRED = [(old, new.replace("1, in_units=10", "1")) for old, new in OF_CRITIC]
TREE = """    distance = 1
    while distance < len(data):
        for i in range(0, len(data) - distance, 2 * distance):
            data[i][:] += data[i + distance].copyto(data[i].context)
        distance *= 2
"""
INTERLEAVED = "    return [data[i :: len(ctx)].as_in_context(c) for i, c in enumerate(ctx)]\n"
CLIPPED = """    for params in device_params:
        mx.gluon.utils.clip_global_norm([p.grad for p in params], X.shape[0])
"""
CLIPPED_SUM = """    trainer.allreduce_grads()
    for c in ctx:
        grads = [p.grad(c) for p in net.collect_params().values() if p.grad_req != "null"]
        gluon.utils.clip_global_norm(grads, 0.1 * X.shape[0])
    trainer.update(X.shape[0])"""


def mean(data):
    scratch.allreduce(data)
    for array in data:
        array /= len(data)


def interleaved(data, ctx):
    return [data[i :: len(ctx)].as_in_context(c) for i, c in enumerate(ctx)]


def write(folder, lesson, *edits):
    """Write a copy of a lesson with edits (old, new). Returns its path."""
    text = TEXTS[lesson]
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "own.py").write_text(text)
    return str(folder / "own.py")


# {mistake: ((lesson, *edits), the claim that does not hold, a word of the reason)}
WRONG = {
    "a mean loss": ((scratch, (LOSS, f"{LOSS}.mean()")), "update", "computes the mean loss of its shard"),
    "a part of a gradient lost": ((scratch, (BACKWARD, BACKWARD + PART_LOST)), "update", "9 of 180 elements of W1"),
    "last examples dropped": ((scratch, (" + (i < extra)", "")), "devices", "drops"),
    "the first shard's accuracy": (
        (scratch, ("in shards]", "in [*shards][:1]]"), ("+= X.shape[0]", "+= split_and_load(X, ctx)[0].shape[0]")),
        "accuracy",
        "once",
    ),
    "losses after the update": ((scratch, (RETURN, LOSSES_AFTER)), "losses", "changed"),
    "mean losses": (
        (scratch, (RETURN, RETURN.replace("losses", "[shard.mean() for shard in losses]"))),
        "losses",
        "for each",
    ),
    "new arrays without gradients": (
        (scratch, (f"for p in params:\n        {SGD}", "params[:] = [p - lr * p.grad / batch_size for p in params]")),
        "runs",
        "attach_grad",
    ),
    "labels of other images": (
        (scratch, (SPLIT, f"{SPLIT}    ys = [nd.concat(y[1:], y[:1], dim=0) for y in ys]\n")),
        "losses",
        "label",
    ),
    "shards of earlier batches": (
        (
            scratch,
            ("shards.append(data[start:end].as_in_context(c))", "shards.append(old.setdefault((c, X.shape), X))"),
            ("        shards.append", "        X = data[start:end].as_in_context(c)\n        shards.append"),
            ("def split_and_load", "old = {}\n\n\ndef split_and_load"),
        ),
        "devices",
        "earlier",
    ),
    "another rate on each device": (
        (scratch, ("sgd(params, lr, ", "sgd(params, lr * 0.9 ** ctx.index(params[0].context), ")),
        "replicas",
        "only the step of",
    ),
    "lr to the power of the devices": (
        (scratch, ("sgd(params, lr, ", "sgd(params, lr ** len(ctx), ")),
        "update",
        "learning rate",
    ),
    "a new array instead of an update": ((scratch, (SGD, "p = p - lr * p.grad / batch_size")), "update", "in place"),
    "update before backward": (
        (scratch, (UPDATE, ""), (BACKWARD, UPDATE + BACKWARD)),
        "update",
        "earlier batch",
    ),
    "sums of earlier calls": (
        (scratch, (SUM, LEFTOVERS), ("def allreduce", "totals = {}\n\n\ndef allreduce")),
        "update",
        "earlier",
    ),
    "the first device k times": (
        (scratch, (SPLIT, f"    ctx = ctx[:1] * len(ctx)\n{SPLIT}")),
        "devices",
        "no examples",
    ),
    "all replicas on cpu(0)": ((scratch, ("p.copyto(ctx)", "p.copyto(mx.cpu(0))")), "devices", "is on cpu(0)"),
    "nan": ((scratch, (LOSS, "y_hat[:, 0] * float('nan')")), "runs", "nan"),
    "labels not split": (
        (scratch, (SPLIT, SPLIT.replace("split_and_load(y, ctx)", "[y.as_in_context(c) for c in ctx]"))),
        "several",
        "split the labels",
    ),
    "Gluon, initialized on one device": (
        (highlevel, ("init, ctx=ctx", "init, ctx=ctx[0]")),
        "several",
        "on all devices",
    ),
    "Gluon, a Trainer that sums nothing": ((highlevel, (TRAINER, "kvstore=None")), "sum", "own gradients"),
    "Gluon, a rate for each device": (
        (highlevel, ('{"learning_rate": lr}', '{"learning_rate": lr * num_gpus}')),
        "update",
        "learning rate",
    ),
    "labels in another order": ((scratch, (SHARDS, REVERSED + SHARDS)), "devices", "gets label"),
    "Gluon, gradients of 8 bits": ((highlevel, (STEP, OF_8_BITS + STEP)), "update", "8 bits"),
    "the sum of sums": (
        (
            scratch,
            ("p.attach_grad()", "p.attach_grad(grad_req='add')"),
            (BACKWARD + SUM_GRADIENTS, IN_PARTS + textwrap.indent(SUM_GRADIENTS, "    ")),
        ),
        "update",
        "16 times, for 8 arrays",
    ),
    "Gluon, statistics that are summed": (
        (highlevel, ("nn.Flatten()", "nn.BatchNorm(), nn.Flatten()"), (STEP, f"{STEP}{SUMMED_STATISTICS}")),
        "update",
        "running statistics",
    ),
    "Gluon, weight decay of each device": ((highlevel, (STEP, DECAY + STEP)), "update", "multiple of the parameters"),
    "a device skips its update": (
        (scratch, ("import mxnet as mx\n", "import mxnet as mx\nimport numpy as np\n"), (UPDATE, SKIP)),
        "update",
        "not finite",
    ),
    "Gluon, a critic whose Trainer sums nothing": (
        (highlevel, *OF_CRITIC, ("    trainer = gluon", CRITIC.replace("KVSTORE", "None"))),
        "sum",
        "own gradients for critic",
    ),
    "Gluon, a critic of unknown shapes whose Trainer sums nothing": (
        (highlevel, *DEFERRED, ("    trainer = gluon", CRITIC.replace("KVSTORE", "None"))),
        "sum",
        "own gradients for critic",
    ),
    "Gluon, a critic's arrays that are updated by hand, each with its own gradients": (
        (highlevel, *HAND_MADE, (STEP, UPDATE_BY_HAND + STEP)),
        "sum",
        "own gradients for critic",
    ),
    "Gluon, compressed gradients": (
        (highlevel, (TRAINER, "compression_params={'type': '2bit', 'threshold': 0.5}")),
        "update",
        "compresses",
    ),
}
FAST = 6  # the first rows are in the normal suite
BATCH_NORM = "batch normalization of the examples of each device"
# {case: ((lesson, *edits), how the steps are compared)}
RIGHT = {
    "scratch": ((scratch,), []),
    "highlevel": ((highlevel,), []),
    "a tree": ((scratch, (SUM, TREE)), []),
    "interleaved shards": ((scratch, ("    size, extra = divmod", f"{INTERLEAVED}    size, extra = divmod")), []),
    "clipping": ((scratch, (UPDATE, CLIPPED + UPDATE)), []),
    "batch normalization, the sum clipped": (
        (highlevel, ("nn.Flatten()", "nn.BatchNorm(), nn.Flatten()"), (STEP, CLIPPED_SUM)),
        [BATCH_NORM],
    ),
    "a Trainer that sums nothing, and a sum": (
        (highlevel, (TRAINER, "kvstore=None"), (STEP, SUM_BY_HAND + STEP)),
        [],
    ),
    "updates on the store": ((highlevel, (TRAINER, "kvstore='local', update_on_kvstore=True")), []),
    "Adam": ((highlevel, ('"sgd", {"learning_rate": lr}', '"adam", {"learning_rate": 0.001}')), []),
    "AdaGrad": ((highlevel, ('"sgd", {"learning_rate": lr}', '"adagrad", {"learning_rate": 0.01}')), []),
    "one-hot labels": ((scratch, (LOSS, "-(nd.one_hot(y, 10) * nd.log_softmax(y_hat)).sum(axis=1)")), []),
    "a critic": ((highlevel, *OF_CRITIC, ("    trainer = gluon", CRITIC.replace("KVSTORE", "'device'"))), []),
    "a critic of unknown shapes": (
        (highlevel, *DEFERRED, ("    trainer = gluon", CRITIC.replace("KVSTORE", "'device'"))),
        [],
    ),
    "a critic's arrays that are updated by hand": (
        (highlevel, *HAND_MADE, (STEP, SUM_OF_CRITICS + UPDATE_BY_HAND + STEP)),
        [],
    ),
    "gradients in float16": (
        (highlevel, (STEP, IN_FLOAT16 + STEP)),
        ["in float64, without the rounding of float16"],
    ),
    "a batch in parts": (
        (scratch, ("p.attach_grad()", "p.attach_grad(grad_req='add')"), (BACKWARD, IN_PARTS)),
        [],
    ),
    "types and modes by position": (
        (
            scratch,
            (
                SPLIT,
                f"{SPLIT}    ys = [nd.cast(data=nd.array(y, y.context, 'float32'), dtype='float16') for y in ys]\n",
            ),
            (LOSS, f"{LOSS} * nd.Dropout(nd.ones(y.shape, y.context, 'float32'), 0.5, 'always')"),
        ),
        ["with dropout off", "in float64, without the rounding of float16"],
    ),
    "dropout": ((highlevel, ("nn.Flatten()", "nn.Dropout(0.5), nn.Flatten()")), ["with dropout off"]),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (i >= FAST)) for i, case in enumerate(WRONG)]
)
def test_a_wrong_step_is_named(case, tmp_path):
    changed, claim, word = WRONG[case]
    report = compare_lesson(write(tmp_path, *changed), CPUS)
    assert word in report.claims[claim]
    assert word in report.verdict


@pytest.mark.slow
@pytest.mark.parametrize("case", RIGHT)
def test_a_right_step_is_not_accused(case, tmp_path):
    changed, how = RIGHT[case]
    report = compare_lesson(write(tmp_path, *changed), CPUS)
    assert report.claims.keys() >= {"losses", "replicas", "update"} and not any(report.claims.values())
    assert report.how == how
    assert "distance" in " ".join(report.notes)


OTHERS = """

def initialize(net, ctx, init=NORMAL):
    net.initialize(init, ctx=ctx)
    net.collect_params().setattr("grad_req", "add")


def _update(shards, first):
    return [shard[first::2] for shard in shards]


def train_batch(X, y, net, ctx, trainer):
    data, label = split_and_load(X, ctx), split_and_load(y, ctx)
    net.collect_params().zero_grad()
    losses = []
    for first in range(2):
        losses += forward_backward(net, _update(data, first), _update(label, first))
        trainer.allreduce_grads()
    trainer.update(X.shape[0])
    return losses
"""
RECURSIVE = """

def allreduce(data):
    if len(data) == 1:
        return
    data[1] += data[0].as_in_context(data[1].context)
    allreduce(data[1:])
    data[1].copyto(data[0])
"""


def test_hints_count_a_lessons_sums_and_no_functions_with_the_same_names(tmp_path):
    (tmp_path / "twice.py").write_text(TEXTS[highlevel] + OTHERS)
    assert "sums gradients 2 times for each update" in compare_lesson(str(tmp_path / "twice.py"), CPUS[:2]).verdict
    path = write(tmp_path, *WRONG["the sum of sums"][0])
    with open(path, "a") as file:
        file.write(RECURSIVE)
    assert "calls allreduce 16 times, for 8 arrays" in compare_lesson(path, CPUS).verdict


def test_the_networks_own_arrays_are_before_those_of_others(tmp_path, monkeypatch):
    """The average of running statistics waits for the first gradient, which must be the last one that is computed."""
    orders, average = [], GluonModel.average_running_stats

    def noted(model, *args):
        orders.append([*model.arrays()])
        average(model, *args)

    monkeypatch.setattr(GluonModel, "average_running_stats", noted)
    changed, _ = RIGHT["a critic"]
    assert compare_lesson(write(tmp_path, *changed), CPUS[:2], steps=1).same
    assert all(order[-2:] == ["critic.weight", "critic.bias"] and len(order) > 2 for order in orders) and orders


PAIRS = """    if len(data) > 1:
        data[0][:] += data[1].copyto(data[0].context)
    for array in data[1:]:
        data[0].copyto(array)
"""


def test_the_command_compares_2_and_3_devices(tmp_path):
    path = write(tmp_path, scratch, (SUM, PAIRS))
    assert compare_lesson(path, CPUS[:2]).same
    result = CliRunner().invoke(check, [path, "--device", "cpu", "--steps", "1"], standalone_mode=False)
    assert result.exit_code == 1 and "with 3 devices" in result.output


@pytest.mark.slow
def test_a_lesson_that_refuses_uneven_batches_is_right_if_all_are_even(tmp_path):
    path = write(tmp_path, highlevel, (", even_split=False", ""))
    assert "even_split" in compare_lesson(path, CPUS[:2]).verdict
    assert compare_lesson(path, CPUS[:2], even=True).same


@pytest.mark.slow
def test_a_layer_that_would_wait_on_one_device_is_refused(tmp_path):
    layer = "gluon.contrib.nn.SyncBatchNorm(num_devices=2), nn.Flatten()"
    for other in [], [*DEFERRED, ("    trainer = gluon", CRITIC.replace("KVSTORE", "'device'"))]:
        report = compare_lesson(write(tmp_path, highlevel, ("nn.Flatten()", layer), *other), CPUS[:2])
        assert report.status == UNKNOWN and "SyncBatchNorm" in report.verdict


@pytest.mark.slow
def test_a_trainer_that_is_not_found_is_said(tmp_path):
    path = write(tmp_path, highlevel, ("    net = lenet()\n", "    net = open('no such file')\n"))
    report = compare_lesson(path, CPUS[:2])
    assert report.same and "no such file" in report.line


AVERAGE = """

average, steps, original = {}, [0], train_batch


def train_batch(X, y, device_params, ctx, lr):
    losses = original(X, y, device_params, ctx, lr)
    steps[0] += 1
    if steps[0] > 100:
        lr = 0
    for params in device_params[:1]:
        for i, p in enumerate(params):
            mean = average.setdefault(i, nd.zeros(p.shape))
            mean[:] = 0.9 * mean + 0.1 * p.as_in_context(mean.context)
    return losses
"""


def test_what_the_file_keeps_and_lines_that_do_not_run_are_noted(tmp_path):
    once = compare_lesson(with_code(tmp_path, AVERAGE), CPUS)
    assert once.same and not any("average" in note for note in once.notes)
    line = (TEXTS[scratch] + AVERAGE).split("        lr = 0\n")[0].count("\n") + 1
    assert any(f"line {line}" in note for note in once.notes)
    thrice = compare_lesson(with_code(tmp_path, AVERAGE.replace("device_params[:1]", "device_params")), CPUS)
    assert thrice.same and any("average" in note for note in thrice.notes)


class Nothing:
    def __call__(self, data):
        pass


REPLACED = [functools.partial(lambda data: None), Nothing(), functools.wraps(scratch.allreduce)(lambda data: None)]


@pytest.mark.slow
@pytest.mark.parametrize("allreduce", REPLACED, ids=["partial", "object", "wrapper"])
def test_a_replacement_that_is_no_plain_function_is_checked(allreduce):
    assert "own gradients" in compare_lesson(lessons.load("scratch", allreduce=allreduce), CPUS[:2]).verdict


MOMENTUM = """
velocities = {}


def sgd(params, lr, batch_size):
    for i, p in enumerate(params):
        v = velocities.setdefault((i, p.context), nd.zeros_like(p))
        v[:] = 0.9 * v + p.grad / batch_size
        p[:] -= lr * v
"""
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
LOGGED = """
import functools


def logged(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


allreduce = logged(allreduce)
"""


def with_code(folder, code):
    """A lesson: scratch.py, and code that follows it."""
    (folder / "own.py").write_text(TEXTS[scratch] + code)
    return lessons.load(str(folder / "own.py"))


@pytest.mark.slow
@pytest.mark.parametrize("code", [MOMENTUM, SUMS, LOGGED], ids=["velocities", "arrays for allreduce", "a decorator"])
def test_a_lesson_may_keep_arrays_decorate_its_functions_and_need_batches_of_ten(code, tmp_path):
    lesson = with_code(tmp_path, code)
    assert compare_lesson(lesson, CPUS).verdict == "" and not getattr(lesson, "velocities", None)


@pytest.mark.slow
def test_a_decorated_function_that_replaces_another_one_with_the_same_decorator_is_checked(tmp_path):
    lesson = with_code(tmp_path, LOGGED)
    lesson.allreduce = lesson.logged(lambda data: None)
    assert "own gradients" in compare_lesson(lesson, CPUS[:2]).verdict


def test_what_is_checked_is_what_runs(tmp_path, monkeypatch):
    """A module that was imported and then patched is not loaded again."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "patched_lesson.py").write_text(TEXTS[scratch])
    lesson = importlib.import_module("patched_lesson")
    assert compare_lesson(lesson, CPUS).verdict == ""
    lesson.allreduce = mean
    assert "0.33333 times" in compare_lesson(lesson, CPUS).verdict


def test_functions_that_are_not_called_are_named(tmp_path):
    file = tmp_path / "star.py"
    file.write_text("from gluon_mgpu.scratch import *\n\n\ndef allreduce(data):\n    pass\n")
    report = compare_lesson(lessons.load(str(file)), CPUS)
    assert "allreduce is not called" in report.verdict


@pytest.mark.slow
def test_the_command_takes_the_shape_of_your_own_data(tmp_path):
    parts = {"images": np.zeros((9, 3, 20, 20), np.uint8), "labels": np.arange(9, dtype=np.uint8) % 4}
    np.savez(tmp_path / "data.npz", **{f"{of}_{part}": a for of in ("train", "test") for part, a in parts.items()})
    (tmp_path / "rgb.py").write_text(TEXTS[highlevel].replace("nn.Dense(10)", "nn.Dense(4)"))
    words = [str(tmp_path / "rgb.py"), "--device", "cpu", "--dataset", "own", "--data-dir", str(tmp_path)]
    result = CliRunner().invoke(check, words, standalone_mode=False)
    assert result.exit_code == 0 and result.output.endswith("takes the same step as on one device\n")


@pytest.mark.slow
@pytest.mark.parametrize("words", ["highlevel --tune", "highlevel --no-hybridize"])
def test_the_command_checks_the_step_that_the_settings_choose(words):
    result = CliRunner().invoke(check, [*words.split(), "--device", "cpu"], standalone_mode=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("words", ["scratch --tune", "scratch --data-dir anywhere", "scratch --dataset mnist"])
def test_the_command_refuses_settings_that_it_would_ignore(words):
    result = CliRunner().invoke(check, [*words.split(), "--device", "cpu"])
    assert result.exit_code == UsageError.exit_status


def test_an_own_lesson_is_compared_before_training_and_named_again_at_the_end(capsys):
    options = {"gpus": 2, "dataset": "synthetic", "limit": 100, "batch_size": 20, "epochs": 1, "seed": 1}
    train(impl=lessons.load("scratch", allreduce=mean), **options)
    wrong = capsys.readouterr().err.splitlines()
    train(impl=lessons.load("scratch", split_and_load=interleaved), **options)
    right = capsys.readouterr().err
    assert len([line for line in wrong if "0.5 times" in line]) == 2 and "0.5 times" in wrong[-1]
    assert "one device" not in right


@pytest.mark.slow
def test_training_checks_the_trainer_with_which_it_trains(tmp_path, capsys):
    """`train` has a Trainer of its own, which sums."""
    options = {"gpus": 2, "dataset": "synthetic", "limit": 100, "batch_size": 20, "epochs": 1, "seed": 1}
    train(impl=write(tmp_path, highlevel, (TRAINER, "kvstore=None"), (STEP, SUM_BY_HAND + STEP)), **options)
    assert "2 times" in capsys.readouterr().err


@pytest.mark.slow
def test_checking_a_lesson_of_ones_own_does_not_change_its_training(tmp_path):
    own = shutil.copy(scratch.__file__, tmp_path / "own.py")
    options = {"gpus": 2, "dataset": "synthetic", "limit": 100, "batch_size": 20, "epochs": 1, "seed": 1}
    losses = [train(impl=str(impl), **options)[-1].train_loss for impl in ("scratch", own)]
    assert losses[0] == losses[1]
