"""The two lessons: the notebooks' functions, a step compared with one device and float64, and what `train` calls."""

import ast
import inspect
import itertools
import re
from functools import partial
from pathlib import Path
from statistics import NormalDist
from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
import small_networks
from mxnet import gluon, nd
from runs import call
from test_partition import batch, contexts

from gluon_mgpu import highlevel, hybrid, scratch, sharded, train
from gluon_mgpu.commands.train import train as train_command
from gluon_mgpu.data import datasets, splitting
from gluon_mgpu.support import errors
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.training import lessons, models, registry
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import read_arrays
from gluon_mgpu.training.record import read

MXNET_2 = mx.__version__ >= "2"
LR = 0.2
OPTIONS = {"dataset": "synthetic", "limit": 300, "epochs": 1, "seed": 1, "device": "cpu"}
MODULES = [scratch, highlevel]


def build(module, devices, **options):
    config = Config(impl=lessons.name_of(module), batch_size=64, **options)
    return models.create_model(module, contexts(devices), config)


COMMON = "split_and_load(data, ctx), evaluate_accuracy(data_iter, net, ctx), "
COMMON += "train(num_gpus, batch_size, lr, epochs, seed)"
NOTEBOOK = {  # signatures in the original cells
    scratch: f"lenet(X, params), get_params(params, ctx), allreduce(data), {COMMON}, "
    "train_batch(X, y, device_params, ctx, lr), sgd(params, lr, batch_size)",
    highlevel: f"forward_backward(net, data, label), {COMMON}, train_batch(X, y, net, ctx, trainer)",
}


@pytest.mark.parametrize("module", MODULES)
def test_functions_have_the_notebooks_arguments_and_no_others(module):
    for name, arguments in re.findall(r"(\w+)\((.*?)\)", NOTEBOOK[module]):
        assert ", ".join(inspect.signature(getattr(module, name)).parameters) == arguments


@pytest.mark.parametrize("module", [scratch, highlevel, sharded, hybrid])
def test_a_lesson_contains_only_functions(module):
    code = Path(module.__file__).read_text()
    assert not [node for node in ast.parse(code).body if isinstance(node, (ast.ClassDef, ast.If))]


@pytest.mark.parametrize("split", [scratch.split_and_load, highlevel.split_and_load, splitting.split])
@pytest.mark.parametrize("examples, devices", [(6, 2), (4, 4), (96, 5), (7, 5), (3, 5)])
def test_a_batch_is_split_in_order_into_one_shard_per_device_of_nearly_equal_size(split, examples, devices):
    data = np.arange(4 * examples).reshape(examples, 4)
    shards = split(nd.array(data), contexts(devices))
    assert [shard.context for shard in shards] == contexts(min(examples, devices))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(np.concatenate([shard.asnumpy() for shard in shards]), data)


@pytest.mark.parametrize("module", MODULES)
def test_accuracy_is_the_fraction_of_examples_whose_label_has_the_highest_score(module):
    rng = np.random.default_rng(0)
    batches = [(rng.random((n, 10)).astype(np.float32), rng.integers(0, 10, n)) for n in (300, 301)]
    right = [(scores.argmax(1) == labels).sum() for scores, labels in batches]
    data_iter = [(nd.array(scores), nd.array(labels)) for scores, labels in batches]
    assert module.evaluate_accuracy(data_iter, lambda X: X, contexts(3)) == pytest.approx(sum(right) / 601)


@pytest.mark.parametrize("module", MODULES)
def test_a_step_refuses_a_batch_that_leaves_a_device_with_its_old_gradients(module):
    with pytest.raises(AssertionError):
        build(module, 3).step(*batch(2), LR)


def test_one_seed_draws_the_same_parameters_in_both_lessons_on_any_number_of_devices():
    drawn = []
    for module in MODULES:
        for devices in (1, 3):
            mx.random.seed(5)
            model = build(module, devices)
            drawn += [read_arrays(model, device) for device in range(devices)]
    np.testing.assert_equal(drawn, drawn[:1] * 8)


@pytest.mark.parametrize(
    "module, own", [(scratch, ("get_params", "lenet", "loss", "allreduce", "sgd")), (highlevel, ("initialize",))]
)
def test_train_calls_every_function_of_the_lesson(module, own, monkeypatch):
    names = (*own, "train_batch", "split_and_load", "forward_backward", "evaluate_accuracy")
    for name in names:
        monkeypatch.setattr(module, name, Mock(wraps=getattr(module, name)))
    train(lessons.name_of(module), 2, 64, LR, **OPTIONS)
    assert {name for name in names if getattr(module, name).called} == {*names}


STAR = "from gluon_mgpu.%s import *\n\n\ndef %s:\n    %s\n"
ZEROS = STAR % ("scratch", "lenet(X, params)", "return nd.zeros((X.shape[0], 10), ctx=X.context)")
DENSE = STAR % ("highlevel", "lenet()", "net = nn.HybridSequential()\n    net.add(nn.Dense(10))\n    return net")
SPLIT = STAR % ("highlevel", "split_and_load(data, ctx)", "return [data.as_in_context(ctx[0])]")
STEP = Path(scratch.__file__).read_text().replace("    losses = f", "\n    losses = f")


@pytest.mark.parametrize(
    "code, changes, not_called",
    [
        (ZEROS, {}, "lenet"),
        (DENSE, {}, ""),
        (SPLIT, {"shares": (1,)}, "split_and_load"),
        (STEP, {}, ""),
        (STEP, {"shares": (1,)}, "train_batch"),
    ],
    ids=["lenet", "lenet of Gluon", "split_and_load", "train_batch", "train_batch with shares"],
)
def test_functions_that_the_user_changed_and_a_step_does_not_call_are_named_also_on_one_device(
    code, changes, not_called, tmp_path, capsys
):
    (tmp_path / "own.py").write_text(code)
    train(str(tmp_path / "own.py"), 1, 64, LR, **changes, **OPTIONS)
    found = re.findall(r"does not call your own (.*) in", capsys.readouterr().err)
    assert found == [not_called] * bool(not_called)


def test_by_default_the_network_as_written_trains_with_mxnets_own_store():
    model = build(highlevel, 2)
    model.step(*batch(8), LR)
    assert type(model.net) is gluon.nn.HybridSequential and (MXNET_2 or model.net.prefix == "cnn_")
    assert type(model.trainer) is gluon.Trainer
    assert isinstance(model.trainer._kvstore, mx.kvstore.KVStore) and model.trainer._kvstore.type == "device"


def test_a_second_model_changes_nothing_in_the_first():
    kinds = [{"tune": tune, "hybridize": hybridize} for tune in (False, True) for hybridize in (False, True)]
    for first, second in itertools.permutations(kinds, 2):
        model, loss_is_hybridized = build(highlevel, 2, **first), highlevel.loss._active
        model.step(*batch(8), LR)
        before = read_arrays(model)
        build(highlevel, 2, **second).step(*batch(8, seed=2), LR)
        assert (highlevel.loss._active, model.net._active) == (loss_is_hybridized, first["hybridize"])
        np.testing.assert_equal(read_arrays(model), before)


@pytest.mark.parametrize("module", MODULES)
def test_a_lessons_own_train_has_the_parameters_of_the_command_line(module, monkeypatch, capsys, tmp_path):
    data = datasets.synthetic(20 * 64, 100, seed=3)  # 20 batches
    monkeypatch.setattr(datasets, "load", lambda *_, **__: data)
    trained = module.train(2, 64, LR, epochs=1, seed=7)
    printed = capsys.readouterr().out
    words = [f"--impl={lessons.name_of(module)}", "--gpus=2", "--batch-size=64", f"--lr={LR}", "--epochs=1"]
    words += ["--seed=7", f"--out={tmp_path}"]
    without_time = partial(re.sub, r"time: \d+\.\d sec", "time")
    assert without_time(call(capsys, train_command, *words)[1]) == without_time(printed)
    found = trained[0] if module is scratch else [p.data(mx.cpu(0)) for p in trained.collect_params().values()]
    recorded = read(tmp_path).arrays
    assert len(found) == 8
    for array, expected in zip(found, recorded.values()):
        np.testing.assert_array_equal(array.asnumpy(), expected)


def test_a_missing_function_or_other_arguments_are_a_usage_error_that_names_the_function(tmp_path):
    code, path = Path(scratch.__file__).read_text(), tmp_path / "my_scratch.py"
    for name, old, new in (
        ("allreduce", "def allreduce(data: list[NDArray])", "def allreduced(data)"),
        ("sgd", "def sgd(params: Params, lr: float, batch_size: int)", "def sgd(params, lr)"),
        ("init_params", "def init_params(", "def initial_params("),
    ):
        assert old in code
        path.write_text(code.replace(old, new))
        with pytest.raises(UsageError, match=name):
            lessons.load(str(path))
    with pytest.raises(UsageError, match="alreduce"):
        lessons.load("scratch", alreduce=lambda data: None)


def test_an_allreduce_that_does_nothing_is_reported_after_each_epoch(capsys):
    lesson = lessons.load("scratch", allreduce=lambda data: None)
    train(lesson, 2, 64, LR, **{**OPTIONS, "epochs": 2})
    assert capsys.readouterr().err.count("the replicas differ") == 2
    train("scratch", 2, 64, LR, **OPTIONS)
    assert "differ" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "old, new",
    [
        ("import mxnet as mx", "import mxnett as mx"),
        ("import mxnet as mx", "import mxnet as mx import"),
        ("shard_loss.backward()", "shard_los.backward()"),
        ("data[0].copyto(data[i])", "data[0].copyto(data[len(data)])"),
    ],
)
def test_a_typo_is_reported_with_its_file_and_line(old, new, tmp_path):
    path = tmp_path / "my_scratch.py"
    code = Path(scratch.__file__).read_text().replace(old, new, 1)
    path.write_text(code)
    with pytest.raises(Exception) as raised:  # noqa: B017  # each typo has its own
        build(lessons.load(str(path)), 2).step(*batch(8), LR)
    line = code[: code.index(new)].count("\n") + 1
    assert errors.line_of(raised.value).startswith(f"{path}, line {line}: ")


@pytest.mark.parametrize(
    "impl, old, new, named",
    [
        ("scratch", "    return params\n", "", "init_params"),
        ("scratch", "    return new_params\n", "", "get_params"),
        ("scratch", "    return correct / examples\n", "    return correct\n", "evaluate_accuracy"),
        ("scratch", "    return losses\n", "    return [float(x.mean().asscalar()) for x in losses]\n", "train_batch"),
        ("highlevel", "    return net\n", "", "lenet"),
    ],
)
def test_a_function_that_returns_nothing_or_no_arrays_is_named(impl, old, new, named, tmp_path):
    path = tmp_path / "own.py"
    before, after = Path(lessons.load(impl).__file__).read_text().split(old, 1)
    path.write_text(before + new + after)
    with pytest.raises(UsageError, match=named):
        train(lessons.load(str(path)), 2, 64, LR, **OPTIONS)


def test_a_network_with_the_lessons_name_or_too_few_names_is_refused():
    with pytest.raises(UsageError):
        registry.register("lenet", small_networks.dense)
    registry.register("two-names", small_networks.normalized, names=("a", "b"))
    with pytest.raises(UsageError):
        build(highlevel, 1, model="two-names")


INITIAL = {  # {network: the distribution function of its initial weights}
    "lenet": np.vectorize(NormalDist(0, 0.01).cdf),
    "lenet-max": lambda weights: np.clip((weights + 0.07) / 0.14, 0, 1),  # Gluon's default, uniform(-0.07, 0.07)
}


@pytest.mark.parametrize("module, model", [(scratch, "lenet"), (highlevel, "lenet"), (highlevel, "lenet-max")])
def test_initial_weights_follow_the_notebooks_distribution_and_biases_are_0(module, model):
    mx.random.seed(1)
    arrays = read_arrays(build(module, 1, model=model))
    assert [array.shape for array in arrays.values()][::2] == scratch.SHAPES
    for name, array in arrays.items():
        if name[0] == "b":
            assert not array.any()
            continue
        expected = INITIAL[model](np.sort(array.ravel()))
        found = np.arange(array.size + 1) / array.size
        distance = max((found[1:] - expected).max(), (expected - found[:-1]).max())
        # The Kolmogorov-Smirnov test: a correct sample exceeds this limit with probability 7e-6.
        assert distance < 2.5 / np.sqrt(array.size), name
