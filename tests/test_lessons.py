"""The two lessons: the notebooks' functions, a step compared with one device and float64, and what `train` calls."""

import ast
import inspect
import re
from functools import partial
from pathlib import Path
from statistics import NormalDist
from unittest.mock import Mock

import mxnet as mx
import numpy as np
import pytest
import small_networks
from lenet64 import scores
from mxnet import gluon, nd
from parity import drift
from runs import call
from test_partition import batch, contexts, parameters

from gluon_mgpu import evaluate, highlevel, implementations, networks, scratch
from gluon_mgpu.commands.train import train as train_command
from gluon_mgpu.data import datasets
from gluon_mgpu.distributed import launch
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import records
from gluon_mgpu.training.replicas import LENET
from gluon_mgpu.training.settings import Settings

LR = 0.2
OPTIONS = {"dataset": "synthetic", "limit": 300, "epochs": 1, "seed": 1, "device": "cpu"}
MODULES = [scratch, highlevel]
# Networks computed in a different order differ by rounding, and by ReLUs whose input is within rounding of 0. Such a
# ReLU turns one of more than 10^5 activations on or off, which moves an update by far less than this part
# of its length. Dropping a shard or dividing by its size would move it by more than half.
ROUNDING_AND_RELUS = 1e-2


@pytest.fixture
def start():
    """LeNet's parameters by name."""
    return {name: p.asnumpy() for name, p in zip(LENET, parameters())}


def replicas(module, devices, start, **options):
    made = implementations.replicas(module, contexts(devices), Settings(batch_size=64, **options))
    made.load_state_dict(start)
    return made


def assert_replicas_equal(made):
    first, *others = [made.parameters(device) for device in range(len(made.ctx))]
    for other in others:
        np.testing.assert_equal(other, first)


class TestSignatures:
    COMMON = "split_and_load(data, ctx), evaluate_accuracy(data_iter, net, ctx), "
    COMMON += "train(num_gpus, batch_size, lr, epochs, seed)"
    NOTEBOOK = {  # signatures in the original cells
        scratch: f"lenet(X, params), get_params(params, ctx), allreduce(data), {COMMON}, "
        "train_batch(X, y, device_params, ctx, lr), sgd(params, lr, batch_size)",
        highlevel: f"forward_backward(net, data, label), {COMMON}, train_batch(X, y, net, ctx, trainer)",
    }

    @pytest.mark.parametrize("module", MODULES)
    def test_functions_have_the_notebooks_arguments_and_no_others(self, module):
        for name, arguments in re.findall(r"(\w+)\((.*?)\)", self.NOTEBOOK[module]):
            assert ", ".join(inspect.signature(getattr(module, name)).parameters) == arguments

    @pytest.mark.parametrize("module, most", [(scratch, 150), (highlevel, 120)])
    def test_a_lesson_contains_only_functions_and_is_short(self, module, most):
        code = Path(module.__file__).read_text()
        assert len(code.splitlines()) <= most
        assert not [node for node in ast.parse(code).body if isinstance(node, (ast.ClassDef, ast.If))]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("examples, devices", [(6, 2), (4, 4), (96, 5), (7, 5), (3, 5)])
def test_a_batch_is_split_in_order_into_one_shard_per_device_of_nearly_equal_size(module, examples, devices):
    data = np.arange(4 * examples).reshape(examples, 4)
    shards = module.split_and_load(nd.array(data), contexts(devices))
    assert [shard.context for shard in shards] == contexts(min(examples, devices))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(np.concatenate([shard.asnumpy() for shard in shards]), data)


def test_a_step_of_scratch_refuses_a_batch_that_leaves_a_device_with_its_old_gradients(start):
    made = replicas(scratch, 3, start)
    with pytest.raises(AssertionError):
        scratch.train_batch(*batch(2), made.model, made.ctx, LR)


class TestStep:
    @pytest.mark.parametrize("module", MODULES)
    def test_with_all_extras_off_an_extended_step_is_the_lessons_bit_for_bit(self, module, start):
        by_lesson, by_base = replicas(module, 3, start), replicas(module, 3, start)
        for n in (48, 50, 3):
            X, y = batch(n, seed=n)
            a, b = by_lesson.train_batch(X, y, LR), by_base.extended_step(X, y, LR, n)
            np.testing.assert_equal([shard.asnumpy() for shard in a], [shard.asnumpy() for shard in b])
            np.testing.assert_equal(by_lesson.parameters(), by_base.parameters())

    @pytest.mark.parametrize("devices", [1, 2, 3, 5])
    @pytest.mark.parametrize(
        "module, options",
        [(scratch, {}), (highlevel, {}), (highlevel, {"hybridize": False}), (highlevel, {"tune": False})],
    )
    def test_each_lesson_on_any_devices_takes_the_step_of_scratch_on_one_and_replicas_stay_equal(
        self, module, options, devices, start
    ):
        one, several = replicas(scratch, 1, start), replicas(module, devices, start, **options)
        for examples in (130, 64, 2, 1):  # the last batches leave devices without an example
            before = several.parameters()
            one.load_state_dict(before)
            steps = [made.train_batch(*batch(examples, seed=examples), LR) for made in (one, several)]
            expected, losses = [np.concatenate([shard.asnumpy() for shard in step]) for step in steps]
            # Sums of at most 800 products, of magnitude up to the largest loss.
            np.testing.assert_allclose(losses, expected, atol=800 * np.finfo(np.float32).eps * expected.max())
            after = several.parameters()
            assert drift.distance(after, one.parameters()) < ROUNDING_AND_RELUS * drift.distance(after, before)
            assert_replicas_equal(several)

    def test_one_seed_draws_the_same_parameters_in_both_lessons_on_any_number_of_devices(self):
        drawn = []
        for module in MODULES:
            for devices in (1, 3):
                mx.random.seed(5)
                made = implementations.replicas(module, contexts(devices))
                assert_replicas_equal(made)
                drawn.append(made.parameters())
        np.testing.assert_equal(drawn, drawn[:1] * 4)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("devices", [1, 3])
def test_accuracy_is_what_numpy_counts_on_any_number_of_devices(module, devices, start):
    X, _ = batch(50)
    y = scores([p.astype(np.float64) for p in start.values()], X.asnumpy().astype(np.float64)).argmax(1)
    y[:20] = (y[:20] + 1) % 10  # 30 of 50 are correct
    made = replicas(module, devices, start)
    data_iter = [(X[a:b], nd.array(y[a:b])) for a, b in ((0, 24), (24, 48), (48, 50))]
    assert made.evaluate_accuracy(data_iter) == 0.6


class TestWhatYouReadIsWhatRuns:
    @pytest.mark.parametrize(
        "module, own", [(scratch, ("get_params", "lenet", "loss", "allreduce", "sgd")), (highlevel, ("initialize",))]
    )
    def test_train_calls_every_function_of_the_lesson(self, module, own, monkeypatch):
        names = (*own, "train_batch", "split_and_load", "forward_backward", "evaluate_accuracy")
        for name in names:
            monkeypatch.setattr(module, name, Mock(wraps=getattr(module, name)))
        implementations.train(module, 2, 64, LR, **OPTIONS)
        assert {name for name in names if getattr(module, name).called} == {*names}

    @pytest.mark.parametrize(
        "impl, changes, not_called",
        [
            ("scratch", {"momentum": 0.9}, ["sgd"]),
            ("scratch", {"weight_decay": 0.1}, ["sgd"]),
            ("scratch", {"shares": (2, 1)}, ["split_and_load", "train_batch"]),
            ("highlevel", {"grad_accum_steps": 2, "max_grad_norm": 1.0}, ["train_batch"]),
            ("scratch", {}, []),
        ],
    )
    def test_a_setting_that_replaces_a_function_of_a_changed_lesson_says_so(self, impl, changes, not_called, capsys):
        original = implementations.load(impl).forward_backward
        lesson = implementations.load(impl, forward_backward=lambda *args: original(*args))
        implementations.train(lesson, 2, 64, LR, **changes, **OPTIONS)
        implementations.replicas(lesson, contexts(2), Settings(**changes))  # as in evaluate, where no step runs
        said = [line for line in capsys.readouterr().err.splitlines() if "does not call your own" in line]
        assert len(said) == bool(not_called) and all(name in said[0] for name in not_called)

    def test_without_tuning_a_plain_gluon_network_trains_with_mxnets_own_store(self):
        made = implementations.replicas("highlevel", contexts(2), Settings(tune=False))
        made.train_batch(*batch(8), LR)
        assert type(made.net) is gluon.nn.HybridSequential and made.net.prefix == "cnn_" and made.model is made.net
        assert isinstance(made.trainer._kvstore, mx.kvstore.KVStore) and made.trainer._kvstore.type == "device"

    @pytest.mark.filterwarnings("ignore:All children of this Sequential")
    def test_a_sequential_that_cannot_be_hybridized_trains_too(self):
        def build():
            net = gluon.nn.Sequential()
            net.add(gluon.nn.Conv2D(4, 3, activation="relu"), gluon.nn.MaxPool2D(), gluon.nn.Dense(10))
            return net

        networks.register("own-sequential", build)
        for options in ({}, {"tune": False}, {"hybridize": False}):
            (epoch,) = implementations.train("highlevel", 2, 64, LR, model="own-sequential", **options, **OPTIONS)
            assert np.isfinite(epoch.train_loss)


class TestTrain:
    """The lessons' own `train`."""

    @pytest.mark.parametrize("module, options", [(scratch, {}), (highlevel, {"tune": False})])
    def test_after_20_steps_it_has_the_parameters_of_the_command_line_bit_for_bit(
        self, module, options, monkeypatch, capsys, tmp_path
    ):
        data = datasets.synthetic(20 * 64, 100, seed=3)  # 20 batches
        monkeypatch.setattr(datasets, "load", lambda *_, **__: data)
        trained = module.train(2, 64, LR, epochs=1, seed=7)
        printed = capsys.readouterr().out
        words = [f"--impl={implementations.name_of(module)}", "--gpus=2", "--batch-size=64", f"--lr={LR}", "--epochs=1"]
        words += ["--seed=7", f"--out={tmp_path}", *(["--no-tune"] if options else [])]
        without_time = partial(re.sub, r"time: \d+\.\d sec", "time")
        assert without_time(call(capsys, train_command, *words)[1]) == without_time(printed)
        found = trained[0] if module is scratch else [p.data(mx.cpu(0)) for p in trained.collect_params().values()]
        recorded = records.last(tmp_path)[0]
        assert len(found) == 8
        for array, expected in zip(found, recorded.values()):
            np.testing.assert_array_equal(array.asnumpy(), expected)


class TestOwnLesson:
    @pytest.fixture
    def path(self, tmp_path):
        """A copy of scratch.py."""
        path = tmp_path / "my_scratch.py"
        path.write_text(Path(scratch.__file__).read_text())
        return path

    def test_a_copy_of_a_lesson_trains_to_the_same_bits_and_its_run_can_be_resumed_and_evaluated(self, path, tmp_path):
        for impl, out in (("scratch", "theirs"), (str(path), "mine")):
            implementations.train(impl, 2, 64, LR, **{**OPTIONS, "epochs": 2, "out": tmp_path / out})
        theirs, mine = (records.last(tmp_path / name)[0] for name in ("theirs", "mine"))
        np.testing.assert_equal(mine, theirs)
        with pytest.raises(UsageError):  # the path in the checkpoint is not executed
            implementations.train(resume=tmp_path / "mine")
        with pytest.raises(UsageError):
            evaluate.load(tmp_path / "mine")
        assert len(implementations.train(str(path), resume=tmp_path / "mine", epochs=3)) == 3
        assert str(path) in evaluate.load(tmp_path / "mine", str(path)).title

    def test_a_restarted_run_continues_with_it(self, path, tmp_path, capsys, monkeypatch):
        implementations.train(str(path), 2, 64, LR, **OPTIONS, out=tmp_path / "run")
        capsys.readouterr()
        monkeypatch.setenv(launch.RESTARTED, "1")
        words = [f"--impl={path}", f"--out={tmp_path / 'run'}", "--epochs=1"]
        assert call(capsys, train_command, *words)[:2] == (0, "")  # all epochs are finished

    def test_an_error_in_it_names_its_file_and_line(self, path, capsys, monkeypatch):
        monkeypatch.chdir(path.parent)
        path.write_text(path.read_text().replace("    return -nd.pick", "    1 / 0\n    return -nd.pick"))
        line = path.read_text().splitlines().index("    1 / 0") + 1
        words = [f"--impl={path.name}", "--dataset=synthetic", "--limit=300", "--device=cpu"]
        status, _, said = call(capsys, train_command, *words)
        assert status == 1 and f"{path}, line {line}: ZeroDivisionError" in said.splitlines()[-1]

    def test_a_missing_function_or_other_arguments_are_a_usage_error_that_names_the_function(self, path):
        code = path.read_text()
        for name, old, new in (
            ("allreduce", "def allreduce(data: list[NDArray])", "def allreduced(data)"),
            ("sgd", "def sgd(params: Params, lr: float, batch_size: int)", "def sgd(params, lr)"),
            ("init_params", "def init_params(", "def initial_params("),
        ):
            assert old in code
            path.write_text(code.replace(old, new))
            with pytest.raises(UsageError, match=name):
                implementations.load(str(path))
        with pytest.raises(UsageError, match="alreduce"):
            implementations.load("scratch", alreduce=lambda data: None)

    def test_an_allreduce_that_does_nothing_is_reported_after_each_epoch(self, capsys):
        lesson = implementations.load("scratch", allreduce=lambda data: None)
        implementations.train(lesson, 2, 64, LR, **{**OPTIONS, "epochs": 2})
        assert capsys.readouterr().err.count("the replicas differ") == 2
        implementations.train("scratch", 2, 64, LR, **OPTIONS)
        assert "differ" not in capsys.readouterr().err


class TestOwnGluonLesson:
    def test_batch_normalization_of_an_own_network_is_averaged_over_the_devices(self, capsys):
        lesson = implementations.load("highlevel", lenet=small_networks.normalized)
        implementations.train(lesson, 2, 64, LR, **OPTIONS)
        assert "differ" not in capsys.readouterr().err
        assert len(implementations.replicas(lesson, contexts(2)).running_stats) == 4

    def test_its_own_initial_weights_are_used(self, tmp_path):
        path = tmp_path / "my_highlevel.py"
        path.write_text(Path(highlevel.__file__).read_text().replace("mx.init.Normal(0.01)", "mx.init.Zero()"))
        made = implementations.replicas(str(path), contexts(1))
        assert not any(array.any() for array in made.parameters().values())

    def test_a_network_registered_with_too_few_names_is_refused(self):
        networks.register("two-names", small_networks.normalized, names=("a", "b"))
        with pytest.raises(UsageError):
            implementations.replicas("highlevel", contexts(1), Settings(model="two-names"))

    def test_an_assertion_without_a_message_is_an_error_of_the_network(self):
        lesson = implementations.load("scratch", lenet=Mock(side_effect=AssertionError))
        with pytest.raises(UsageError):
            implementations.train(lesson, 2, 64, LR, **OPTIONS)

    def test_after_a_run_without_hybridizing_the_loss_is_not_hybridized(self):
        for hybridize in (True, False):
            implementations.replicas("highlevel", contexts(1), Settings(hybridize=hybridize))
            assert highlevel.loss._active == hybridize


INITIAL = {  # {network: the distribution function of its initial weights}
    "lenet": np.vectorize(NormalDist(0, 0.01).cdf),
    "lenet-max": lambda weights: np.clip((weights + 0.07) / 0.14, 0, 1),  # Gluon's default, uniform(-0.07, 0.07)
}


@pytest.mark.parametrize("module, model", [(scratch, "lenet"), (highlevel, "lenet"), (highlevel, "lenet-max")])
def test_initial_weights_follow_the_notebooks_distribution_and_biases_are_0(module, model):
    mx.random.seed(1)
    for name, array in implementations.replicas(module, contexts(1), Settings(model=model)).parameters().items():
        if name[0] == "b":
            assert not array.any()
            continue
        expected = INITIAL[model](np.sort(array.ravel()))
        found = np.arange(array.size + 1) / array.size
        distance = max((found[1:] - expected).max(), (expected - found[:-1]).max())
        # The Kolmogorov-Smirnov test: a correct sample exceeds this limit with probability 7e-6.
        assert distance < 2.5 / np.sqrt(array.size), name


def test_it_has_the_layers_and_the_parameters_of_resnet_18():
    made = implementations.replicas("highlevel", [mx.cpu(0)], Settings(model="resnet18"))
    weights = [a.shape for a in made.parameters().values() if a.ndim > 1]
    expected = [(64, 1, 3, 3)]
    for channels, before in [(64, 64), (128, 64), (256, 128), (512, 256)]:
        shortcut = [(channels, before, 1, 1)] if channels != before else []
        expected += [(channels, before, 3, 3), (channels, channels, 3, 3), *shortcut]
        expected += 2 * [(channels, channels, 3, 3)]
    assert weights == [*expected, (10, 512)]
    trained = sum(p.size for p in made.grads()[0].values())
    batch_norms = 2 * (64 * 5 + 4 * (128 + 256 + 512))
    assert trained == sum(int(np.prod(shape)) + shape[0] for shape in weights) + batch_norms
