"""Training as users start it: its settings, and what it prints, leaves behind and refuses."""

import contextlib
import dataclasses
import fcntl
import inspect
import itertools
import json
import os
import pty
import random
import re
import signal
import struct
import subprocess
import termios
import time
import types
import weakref
from unittest.mock import patch

import interrupts
import mxnet as mx
import numpy as np
import pytest
import runs
from mxnet import nd
from mxnet.gluon import nn
from runs import finished, refuses

from gluon_mgpu import highlevel, networks, scratch
from gluon_mgpu import train as training
from gluon_mgpu.commands.train import train as train_command
from gluon_mgpu.data import datasets
from gluon_mgpu.support.errors import Error
from gluon_mgpu.training import checkpoint, lessons, loop, registry
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.folder import FILES, Folder
from gluon_mgpu.training.losses import Pending
from gluon_mgpu.training.models import LENET_NAMES
from gluon_mgpu.training.record import Epoch

SYNTHETIC = ("--dataset", "synthetic", "--device", "cpu")
FIELDS = [field.name for field in dataclasses.fields(Config)]
SMALL = {"gpus": 2, "device": "cpu", "dataset": "synthetic", "limit": 100, "batch_size": 20, "seed": 1}


def train(impl="scratch", gpus=2, batch_size=50, lr=0.2, **options):
    defaults = {"dataset": "synthetic", "limit": 100, "epochs": 1, "seed": 0, "device": "cpu"}
    return training(impl, gpus, batch_size, lr, **{**defaults, **options})


def test_the_command_prints_only_the_notebooks_lines_and_leaves_its_record(tmp_path):
    options = ("--impl", "scratch", "--gpus", 3, "--limit", 1001, "--epochs", 2, "--seed", 5, "--out", tmp_path)
    done = finished(*runs.TRAIN, *SYNTHETIC, *options)
    assert (done.returncode, done.stderr) == (0, "")
    first, *epochs = done.stdout.splitlines()
    assert first == "running on: [cpu(0), cpu(1), cpu(2)]"
    printed = [re.fullmatch(r"epoch (\d), time: (\d+\.\d) sec, test acc: (\d\.\d\d)", line).groups() for line in epochs]
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [m["epoch"] for m in metrics] == [1, 2]
    assert printed == [(str(m["epoch"]), f"{m['train_seconds']:.1f}", f"{m['test_accuracy']:.2f}") for m in metrics]
    assert all(m["samples_per_second"] == pytest.approx(1001 / m["train_seconds"]) for m in metrics)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["devices"] == ["cpu(0)", "cpu(1)", "cpu(2)"]
    assert {"impl": "scratch", "batch_size": 256, "limit": 1001, "seed": 5, "lr": 0.2}.items() <= config.items()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    arrays, facts = checkpoint.load(tmp_path / "checkpoint.npz")
    assert tuple(arrays) == LENET_NAMES and arrays["W3"].shape == (128, 800)
    assert (facts["config"], len(facts["history"]), facts["steps"]) == (config, 2, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize(
    "read", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["output read", "nobody reads"]
)
def test_ctrl_c_exits_with_130_and_saves_a_checkpoint(read, tmp_path):
    options = ("--limit", "500", "--epochs", "999", "--gpus", "2", "--out", str(tmp_path))
    line = [*runs.TRAIN, *SYNTHETIC, *options]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while b"epoch 1" not in process.stdout.readline():
            pass
        if not read:
            process.stdout.close()  # as Ctrl-C does in `2>&1 | tee log`
        process.send_signal(signal.SIGINT)
        assert process.wait(runs.HORIZON) == 130
        assert not read or f"--resume {tmp_path}" in process.stdout.read().decode().splitlines()[-1]
    assert checkpoint.load(tmp_path / "checkpoint.npz")[1]["history"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["a reader that ends", "/dev/full"])
def test_if_nothing_can_be_printed_training_ends_with_one_line_and_what_was_printed_was_saved(output, tmp_path):
    line = [*runs.TRAIN, *SYNTHETIC, "--limit", "100", "--epochs", "500", "--seed", "1", "--out", tmp_path]
    with open(output, "wb") if output == "/dev/full" else contextlib.nullcontext(subprocess.PIPE) as stdout:
        process = subprocess.Popen(line, stdout=stdout, stderr=subprocess.PIPE, text=True)
    printed = []
    if process.stdout:
        printed = [process.stdout.readline() for _ in range(2)]
        process.stdout.close()
    err = process.communicate()[1]
    assert (process.returncode, err.count("\n")) == (1, 1) and err.startswith("error: cannot print ("), err
    if printed:
        assert f"--resume {tmp_path}" in err
        assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["epoch"] == 1


@pytest.mark.slow
def test_a_terminal_shows_a_bar_with_examples_and_loss():
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))  # 24 lines of 120 characters
    words = [*runs.TRAIN, *SYNTHETIC, "--gpus", "2", "--limit", "5000", "--epochs", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # raised when the other end is closed
        while part := os.read(main, 65536):
            shown += part
    os.close(main)
    assert process.wait() == 0 and b"test acc" in process.communicate()[0]
    assert re.search(rb"epoch 1: +\d+%.*/5\.00k .*examples/s, loss \d\.\d{3}", shown), shown


@pytest.mark.parametrize("kept, sent", [(True, [signal.SIGTERM, signal.SIGINT]), (False, [signal.SIGINT])])
def test_ctrl_c_is_a_keyboard_interrupt_whose_line_mentions_a_checkpoint_only_if_one_was_saved(
    kept, sent, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "SAME_SIGNAL", runs.HORIZON)  # even on a busy machine
    with interrupts.at_step(2, *[(which, 0) for which in sent]) as caught:
        train(batch_size=10, out=tmp_path if kept else None)
    line = str(caught.value)
    assert "\n" not in line and "--" not in line and ("checkpoint" in line) == (str(tmp_path) in line) == kept
    assert caught.value._render_traceback_() == [f"KeyboardInterrupt: {line}"]  # what Jupyter shows
    assert not kept or checkpoint.load(tmp_path / "checkpoint.npz")[1]["steps"] == 2


def test_a_second_ctrl_c_stops_within_the_step_and_leaves_the_files_of_the_last_epoch(tmp_path):
    issued = []

    def twice():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            time.sleep(loop.SAME_SIGNAL)
        issued.append(True)

    with pytest.raises(KeyboardInterrupt), interrupts.in_step(13, twice):
        train(batch_size=10, epochs=2, out=tmp_path)
    assert not issued
    facts = checkpoint.load(tmp_path / "checkpoint.npz")[1]
    assert (len(facts["history"]), facts["steps"]) == (1, 0)
    assert {path.name for path in tmp_path.iterdir()} <= {*FILES}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("epochs", [1, 2])
def test_ctrl_c_during_a_save_ends_the_program_once_all_is_saved_and_before_the_epochs_line(epochs, tmp_path, capsys):
    write, printed = Folder.write, []

    def interrupted_write(self, run):
        printed.append(capsys.readouterr().out)
        signal.raise_signal(signal.SIGINT)
        write(self, run)

    with pytest.raises(KeyboardInterrupt), patch.object(Folder, "write", interrupted_write):
        train(batch_size=50, epochs=epochs, out=tmp_path)
    assert "epoch 1" not in printed[0] and len(checkpoint.load(tmp_path / "checkpoint.npz")[1]["history"]) == 1


def test_a_signal_that_the_parent_ignores_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.in_step(2, lambda: signal.raise_signal(signal.SIGINT)):
            assert len(train(batch_size=50, epochs=1)) == 1
    finally:
        signal.signal(signal.SIGINT, before)


def test_mean_losses_are_refused_because_the_training_loss_would_be_wrong():
    def means(*args):
        return [losses.mean() for losses in scratch.forward_backward(*args)]

    with pytest.raises(Error):
        train(lessons.load("scratch", forward_backward=means), batch_size=50, epochs=1)


def test_the_network_of_an_earlier_training_is_freed_by_the_next():
    built = []

    def build():
        net = highlevel.lenet()
        built.append(weakref.ref(net))
        return net

    registry.register("counted", build)
    for _ in range(2):
        train("highlevel", batch_size=50, epochs=1, model="counted")
    assert built[0]() is None and built[1]() is not None


@pytest.mark.slow
def test_neither_numpys_nor_pythons_random_numbers_change_because_of_a_training():
    np.random.seed(5), random.seed(5)
    expected = np.random.rand(), random.random()
    np.random.seed(5), random.seed(5)
    train(batch_size=50, epochs=1)
    assert (np.random.rand(), random.random()) == expected


def works(batch_size, examples, need):
    """Whether each step of an epoch has enough examples."""
    return all(min(batch_size, examples - start) >= need for start in range(0, examples, batch_size))


def test_a_batch_with_fewer_examples_than_devices_is_refused_with_batch_sizes_that_work():
    for examples, devices, batch_size in itertools.product(range(1, 25), range(1, 5), range(1, 27)):
        config = Config(batch_size=batch_size)
        if works(batch_size, examples, devices):
            config.check_batch_size(examples, devices)
            continue
        refused = refuses("batch_size", config.check_batch_size, examples, devices)
        offered = re.findall(r"\d+", str(refused).split("; use ")[1])
        assert bool(offered) == (examples >= devices)
        assert all(works(int(size), examples, devices) for size in offered), (examples, devices, batch_size)


def test_the_users_home_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config.parse({"out": "~/run"}) == {"out": str(tmp_path / "run")}


@pytest.mark.parametrize("folder", ["/proc", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_an_error_before_training_but_not_of_usage(folder, capsys):
    with pytest.raises(Error) as caught:
        train(out=folder)
    assert folder in str(caught.value) and caught.type is Error and capsys.readouterr().out == ""


@pytest.mark.slow
def test_an_invalid_backend_for_curves_is_refused_before_training(tmp_path):
    environment = {**os.environ, "MPLBACKEND": "nonsense"}
    done = finished(*runs.TRAIN, *SYNTHETIC, "--limit", 100, "--out", tmp_path / "run", env=environment)
    assert (done.returncode, done.stdout) == (2, "") and "MPLBACKEND='nonsense'" in done.stderr.splitlines()[-1]


def test_a_lesson_without_a_file_trains_like_one_with_a_file():
    lesson = types.ModuleType("mine")
    vars(lesson).update({name: value for name, value in vars(scratch).items() if not name.startswith("__")})
    assert train(lesson)[0].train_loss == train()[0].train_loss


def test_a_run_that_diverges_is_stopped_in_its_first_epoch_and_its_folder_can_be_used_again(tmp_path):
    with pytest.raises(Error, match="epoch 1"):
        train(lr=1e19, limit=1000, epochs=3, out=tmp_path)
    assert not list(tmp_path.iterdir())
    train(out=tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_ends_the_run(value):
    lesson = lessons.load("scratch", loss=lambda y_hat, y: scratch.loss(y_hat, y) + value)
    with pytest.raises(Error):
        train(lesson, gpus=1)


def test_mxnet_owns_the_memory_of_a_batch(monkeypatch):
    monkeypatch.delattr(nd, "from_numpy")  # an engine thread would free its memory through Python
    assert len(train()) == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 17, 100])
def test_results_are_read_in_order_and_none_is_lost_while_later_steps_are_issued(steps):
    pending, ahead, read = Pending(), [], []
    for i in range(steps):
        pending.add([nd.full(2, i, mx.cpu(0)), nd.full(1, i, mx.cpu(1))])
        for result in pending.ready():
            read.append(result)
            ahead.append(i + 1 - len(read))
    read += pending.rest()
    np.testing.assert_array_equal(np.concatenate([[], *read]), np.repeat(np.arange(steps), 3))
    assert steps < 100 or max(ahead) >= 8


def rates(settings, steps_per_epoch=10):
    return [settings.learning_rate(step, steps_per_epoch) for step in range(settings.epochs * steps_per_epoch)]


@pytest.mark.parametrize("warmup_epochs", [0, 1.5])
def test_after_the_warm_up_the_cosine_schedule_is_that_of_mxnets_scheduler(warmup_epochs):
    own = rates(Config(lr=0.4, epochs=5, schedule="cosine", warmup_epochs=warmup_epochs))
    warmup = int(warmup_epochs * 10)
    mxnets = mx.lr_scheduler.CosineScheduler(max_update=50, base_lr=0.4, warmup_steps=warmup)
    assert own[warmup:] == pytest.approx([mxnets(update) for update in range(warmup, 50)])


def test_by_default_the_rate_is_constant_after_a_linear_warm_up():
    own = rates(Config(lr=0.4, warmup_epochs=0.5))
    assert own[:5] == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.40]) and set(own[5:]) == {0.4}


registry.register("9 classes", lambda: nn.Dense(9))
registry.register("11 classes", lambda: nn.Dense(11))
registry.register("with init", networks.resnet18, mx.init.Xavier())
WITHOUT_INIT = lessons.load("highlevel", initialize=lambda net, ctx: highlevel.initialize(net, ctx))


@pytest.mark.parametrize(
    "name, settings",
    [
        ("batch_size", {"gpus": 3, "limit": 22}),
        ("shares", {"gpus": 3, "shares": (80, 20)}),
        ("shares", {"gpus": 1, "shares": (80, 20)}),
        ("data_dir", {"dataset": datasets.synthetic(100, 100), "data_dir": "elsewhere"}),
        ("resume", {"resume": "", "out": None}),
        ("model", {"model": "resnet18"}),
        ("model", {"impl": "highlevel", "model": "none"}),
        ("model", {"impl": "highlevel", "model": "9 classes"}),
        ("model", {"impl": "highlevel", "model": "11 classes"}),
        ("model", {"impl": WITHOUT_INIT, "model": "with init"}),
        ("weight_decay", {"impl": "scratch", "weight_decay": 0.1}),
        ("momentum", {"impl": "scratch", "momentum": 0.9}),
        *(("impl", {"impl": impl}) for impl in ("torch", "nowhere.py", ".", "", None)),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused_before_anything_is_printed_or_written(
    name, settings, tmp_path, capsys
):
    refuses(name, training, **{**SMALL, "out": tmp_path / "run", **settings})
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


INVALID = [{"dataset": "cifar"}, {"out": ""}, {"out": 3}, {"out": b"runs"}, {"out": "x" * 300}, {"resume": "a\0"}]
INVALID += [{"data_dir": "a/" + "x" * 300}, {"schedule": "step"}, {"momentum": None}]
INVALID += [{"shares": (1, "x")}, {"shares": "auto"}, {"shares": ("nan", 1)}]


@pytest.mark.parametrize("wrong", INVALID, ids=str)
def test_an_invalid_setting_is_a_usage_error_in_one_line_with_its_name(wrong):
    refuses(next(iter(wrong)), Config.parse, wrong)


def test_empty_shares_are_no_shares():
    assert Config.parse({"shares": ()}) == {"shares": None}


def test_numpys_numbers_and_paths_are_accepted_like_pythons(tmp_path):
    numpys = {"gpus": np.int64(2), "seed": np.int32(1), "epochs": np.uint8(3), "lr": np.float64(0.5)}
    numpys |= {"shares": np.array([3, 1]), "out": tmp_path}
    train(**numpys)
    recorded = json.loads((tmp_path / "config.json").read_text())
    expected = {"seed": 1, "epochs": 3, "lr": 0.5, "shares": [3, 1]}
    assert expected.items() <= recorded.items() and len(recorded["devices"]) == 2


def test_train_has_the_settings_as_arguments_and_rejects_others_as_every_function_does():
    signature = inspect.signature(training)
    assert [*signature.parameters] == FIELDS and signature.return_annotation == "list[Epoch]"
    for args, options in (((), {"momentun": 0.9}), (("scratch",), {"impl": "x"}), (range(len(FIELDS) + 1), {})):
        with pytest.raises(TypeError):
            training(*args, **options)


@pytest.mark.parametrize("name", FIELDS)
def test_the_command_line_gives_the_same_value_as_python(name):
    default, flag = getattr(Config(), name), f"--{name.replace('_', '-')}"
    texts = [str(default)] if isinstance(default, (int, float, str)) and not isinstance(default, bool) else []
    for words in ([], *([flag, text] for text in texts)):
        with train_command.make_context("train", words) as context:
            assert context.params[name] == default


@pytest.mark.parametrize("steps, notices", [(50, "1000"), (49, "0100"), (10, "0000")])
def test_losses_like_that_of_guessing_are_reported_once_and_only_when_they_could_be_lower(steps, notices, capsys):
    history, said = [], ""
    for epoch in range(1, 5):
        loss = 2.2 if epoch == 3 else np.log(10)
        history.append(Epoch(epoch, 1.0, 1.0, loss, 0.1, 0.2))
        loop._say_if_guessing(history, 10, steps)
        said += str(capsys.readouterr().err.count("\n"))
    assert said == notices
