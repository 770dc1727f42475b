"""A run that ended, in whatever way, goes on to where it would have come."""

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint, records

SCRIPT = Path(__file__).parents[1] / "scripts" / "train.py"
IMPLS = {"scratch": scratch, "highlevel": highlevel}
BEYOND = {"momentum": 0.9, "weight_decay": 0.001, "schedule": "cosine", "warmup_epochs": 0.5, "accumulate": 2}
SIZE = {"dataset": "synthetic", "limit": 600, "epochs": 3, "seed": 2, "device": "cpu"}  # 10 steps an epoch


def train(impl, devices=2, **options):
    return IMPLS[impl].train(devices, 64, 0.1, **{**SIZE, **options})


def interrupt(monkeypatch, impl, at_step, by=signal.SIGINT):
    """Ctrl-C, or another signal, while the step is issued that is at_step'th from now, once."""
    original, taken = IMPLS[impl].Replicas.train_batch, []

    def train_batch(self, X, y, lr):
        taken.append(lr)
        if len(taken) == at_step:
            signal.raise_signal(by)
        return original(self, X, y, lr)

    monkeypatch.setattr(IMPLS[impl].Replicas, "train_batch", train_batch)


def left(folder):
    """All that a run leaves, without its times: (arrays, losses, accuracies and learning rates)."""
    arrays, _ = checkpoint.load(folder / "checkpoint.npz")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return arrays, [
        {k: v for k, v in line.items() if k not in ("train_seconds", "samples_per_second")} for line in lines
    ]


def assert_same_bits(a, b):
    (arrays_a, metrics_a), (arrays_b, metrics_b) = a, b
    assert arrays_a.keys() == arrays_b.keys()
    for name, array in arrays_a.items():
        np.testing.assert_array_equal(array, arrays_b[name])
    assert metrics_a == metrics_b


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nothing interrupted: {(impl, whether with momentum and so on): what it left}."""
    runs = {}
    for impl in IMPLS:
        for beyond in (False, True):
            out = tmp_path_factory.mktemp("whole") / "run"
            train(impl, out=out, **(BEYOND if beyond else {}))
            runs[impl, beyond] = left(out)
    return runs


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("beyond", [False, True], ids=["plain", "beyond"])
@pytest.mark.parametrize("at_step", [1, 4, 10, 13, 30])
def test_a_run_interrupted_at_any_step_and_resumed_ends_with_the_bits_of_a_whole_one(
    impl, beyond, at_step, whole, monkeypatch, tmp_path
):
    options = BEYOND if beyond else {}
    interrupt(monkeypatch, impl, at_step)
    with pytest.raises(KeyboardInterrupt):
        train(impl, out=tmp_path, **options)
    arrays, facts = checkpoint.load(tmp_path / "checkpoint.npz")
    assert len(facts["history"]) * 10 + facts["steps"] == at_step
    train(impl, resume=tmp_path, **options)
    assert_same_bits(left(tmp_path), whole[impl, beyond])


def test_a_run_that_is_asked_to_terminate_leaves_its_checkpoint_too(whole, monkeypatch, tmp_path):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        interrupt(patched, "scratch", 13, by=signal.SIGTERM)
        train("scratch", out=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    train("scratch", resume=tmp_path)
    assert_same_bits(left(tmp_path), whole["scratch", False])


def test_a_run_interrupted_again_and_again_ends_with_the_bits_of_a_whole_one(whole, monkeypatch, tmp_path):
    for resume in (None, tmp_path, tmp_path):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            interrupt(patched, "scratch", 7)
            train("scratch", out=tmp_path, resume=resume)
    train("scratch", resume=tmp_path)
    assert_same_bits(left(tmp_path), whole["scratch", False])


@pytest.mark.parametrize("impl", IMPLS)
def test_more_epochs_can_be_given_to_a_run_that_is_done(impl, whole, tmp_path, capsys):
    train(impl, out=tmp_path, epochs=1)
    capsys.readouterr()
    train(impl, resume=tmp_path)
    assert f"resuming {tmp_path} after 1 epoch: epochs 3 where the run had 1\n" in capsys.readouterr().err
    assert_same_bits(left(tmp_path), whole[impl, False])


def test_a_run_that_is_done_is_left_as_it_is_whatever_it_is_resumed_with(begun, capsys):
    before, named = files(begun), f"gluon_mgpu: resuming {begun} after 1 epoch\n"
    capsys.readouterr()
    for impl, devices in (("scratch", 2), ("highlevel", 3)):
        assert [e.epoch for e in train(impl, devices, resume=begun, epochs=1)] == [1]
        said = capsys.readouterr()
        assert said.err == f"{named}gluon_mgpu: all epochs are done; --epochs gives it more\n" and said.out == ""
        assert files(begun) == before


def test_what_a_run_killed_after_its_last_epoch_lacks_is_written_on_resume(begun):
    before = files(begun)
    for name in ("metrics.jsonl", "curves.png"):
        (begun / name).unlink()
        (begun / f".{name}.abc123.part").write_bytes(b"half")
    train("scratch", resume=begun, epochs=1)
    assert files(begun) == before


def test_a_profile_of_a_run_that_is_done_is_refused(begun, tmp_path):
    with pytest.raises(UsageError, match="profile.json: 0 steps to train, 10 an epoch: .*; give more epochs"):
        train("scratch", resume=begun, epochs=1, profile=tmp_path / "profile.json")


def test_fewer_epochs_than_the_run_was_to_have_are_said(begun, capsys):
    config = json.loads((begun / "config.json").read_text())
    (begun / "checkpoint.npz").unlink()
    (begun / "config.json").write_text(json.dumps({**config, "epochs": 4}))  # as a run of 4 that was killed at once
    assert len(train("scratch", resume=begun, epochs=1)) == 1
    assert f"resuming {begun} after no step: epochs 1 where the run had 4\n" in capsys.readouterr().err


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_run_goes_on_on_other_devices_to_the_same_parameters_but_for_rounding_and_says_so(
    impl, devices, whole, monkeypatch, tmp_path, capsys
):
    interrupt(monkeypatch, impl, 13)
    with pytest.raises(KeyboardInterrupt):
        train(impl, out=tmp_path, **BEYOND)
    capsys.readouterr()
    train(impl, devices, resume=tmp_path, **BEYOND)
    said = f"devices {[f'cpu({i})' for i in range(devices)]} where the run had ['cpu(0)', 'cpu(1)']"
    assert (said in capsys.readouterr().err) == (devices != 2)
    arrays, _ = left(tmp_path)
    for name, array in whole[impl, True][0].items():
        np.testing.assert_allclose(arrays[name], array, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("first, second", [("scratch", "highlevel"), ("highlevel", "scratch")])
def test_what_one_implementation_began_the_other_ends(first, second, whole, monkeypatch, tmp_path, capsys):
    interrupt(monkeypatch, first, 13)
    with pytest.raises(KeyboardInterrupt):
        train(first, out=tmp_path, **BEYOND)
    train(second, resume=tmp_path, **BEYOND)
    assert f"impl {second} where the run had {first}" in capsys.readouterr().err
    arrays, _ = left(tmp_path)
    for name, array in whole[second, True][0].items():
        np.testing.assert_allclose(arrays[name], array, rtol=1e-3, atol=1e-5)


def test_resnet_18_goes_on_with_its_running_statistics_to_the_same_bits(monkeypatch, tmp_path):
    small = {"model": "resnet18", "limit": 20, "epochs": 1, "momentum": 0.9}
    highlevel.train(2, 8, 0.05, **{**SIZE, **small}, out=tmp_path / "whole")
    interrupt(monkeypatch, "highlevel", 2)
    with pytest.raises(KeyboardInterrupt):
        highlevel.train(2, 8, 0.05, **{**SIZE, **small}, out=tmp_path / "cut")
    highlevel.train(2, 8, 0.05, **{**SIZE, **small}, resume=tmp_path / "cut")
    assert_same_bits(left(tmp_path / "cut"), left(tmp_path / "whole"))
    assert "1.running_var" in left(tmp_path / "cut")[0]


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_is_pickled_or_unpickled_on_the_way(impl, monkeypatch, tmp_path):
    def refused(*_, **__):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, refused)
    train(impl, out=tmp_path, **{**BEYOND, "epochs": 2, "schedule": "constant"})
    train(impl, resume=tmp_path, **{**BEYOND, "schedule": "constant"})
    assert len(left(tmp_path)[1]) == 3


@pytest.fixture
def begun(tmp_path):
    """The folder of a run of one epoch."""
    train("scratch", out=tmp_path / "run", epochs=1)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "other",
    [
        {"dataset": "fashion-mnist"},
        {"limit": 700},
        {"seed": 3},
        {"momentum": 0.5},
        {"weight_decay": 0.1},
        {"accumulate": 2},
        {"schedule": "cosine"},
        {"clip_norm": 1.0},
        {"scale_lr": True},
    ],
    ids=str,
)
def test_other_settings_than_the_runs_are_refused_by_name_and_nothing_is_overwritten(other, begun):
    before = files(begun)
    with pytest.raises(UsageError, match=f"the run has {next(iter(other))} .*, not ") as caught:
        train("scratch", resume=begun, **other)
    assert str(caught.value).endswith(f": give its own, or leave --{next(iter(other)).replace('_', '-')} away")
    assert "\n" not in str(caught.value) and files(begun) == before


def test_another_model_is_refused_and_nothing_is_overwritten(begun):
    before = files(begun)
    with pytest.raises(UsageError, match="the run has model lenet, not lenet-max"):
        train("highlevel", resume=begun, model="lenet-max")
    assert files(begun) == before


def test_fewer_epochs_than_are_done_are_refused(begun):
    train("scratch", resume=begun, epochs=2)
    with pytest.raises(UsageError, match="epochs 1: 2 are done already"):
        train("scratch", resume=begun, epochs=1)


def test_a_run_that_was_given_more_epochs_and_then_killed_remembers_them(begun, monkeypatch):
    def dies(*_):
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(scratch.Replicas, "train_batch", dies)
        train("scratch", 3, resume=begun, epochs=5)
    kept = records.options(begun)
    assert (kept["epochs"], kept["gpus"]) == (5, [0, 1, 2])


@pytest.mark.parametrize("name", records.FILES)
def test_a_folder_that_holds_any_file_of_a_run_is_not_overwritten(name, tmp_path):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UsageError, match="a run is there already"):
        train("scratch", out=tmp_path)
    assert files(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("option", ["out", "resume"])
def test_an_empty_folder_name_is_refused(option):
    with pytest.raises(UsageError, match=f"--{option} '': give a folder"):
        train("scratch", **{option: ""})


def test_ctrl_c_keeps_the_last_checkpoint_rather_than_parameters_that_are_not_numbers(monkeypatch, tmp_path):
    original, steps = scratch.Replicas.train_batch, []

    def train_batch(self, X, y, lr):
        losses = original(self, X, y, lr)
        steps.append(lr)
        if len(steps) == 13:
            for params in self.device_params:
                params[1][:] = np.nan  # a ReLU hides it from the loss
        if len(steps) == 15:
            signal.raise_signal(signal.SIGINT)
        return losses

    monkeypatch.setattr(scratch.Replicas, "train_batch", train_batch)
    with pytest.raises(Error, match="not (a number|numbers)"):
        train("scratch", out=tmp_path)
    arrays, facts = checkpoint.load(tmp_path / "checkpoint.npz")
    assert len(facts["history"]) == 1 and all(np.isfinite(a).all() for a in arrays.values())


def test_another_number_of_openmp_threads_is_said(begun, monkeypatch, capsys):
    monkeypatch.setattr(engine, "openmp_threads", lambda: 1)
    train("scratch", 1, resume=begun, epochs=2)
    capsys.readouterr()
    monkeypatch.setattr(engine, "openmp_threads", lambda: 7)
    train("scratch", 1, resume=begun, epochs=3)
    assert "threads 7 where the run had 1: the same to rounding, not bit for bit" in capsys.readouterr().err


def test_resnet_18_on_other_devices_is_said_to_be_another_result(monkeypatch, tmp_path, capsys):
    small = {**SIZE, "model": "resnet18", "limit": 16, "epochs": 1}
    highlevel.train(2, 8, 0.05, **small, out=tmp_path)
    highlevel.train(1, 8, 0.05, **{**small, "epochs": 2}, resume=tmp_path)
    assert "not the same result, since batch normalization is of each device's shard" in capsys.readouterr().err


def test_tensorboard_goes_on_with_every_epoch(begun):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train("scratch", resume=begun, epochs=2, tensorboard=True)  # the first epoch too, which was without
    train("scratch", resume=begun, epochs=3)  # not asked again
    events = reader.EventAccumulator(str(begun / "tensorboard"))
    events.Reload()
    assert {e.step for e in events.Tensors("train_loss")} == {1, 2, 3}


def test_a_run_goes_on_without_tensorboard_where_its_package_is_gone_and_says_so_first(begun, monkeypatch, capsys):
    (begun / "tensorboard").mkdir()
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)  # as if it were not installed
    assert len(train("scratch", resume=begun, epochs=2)) == 2
    assert "tensorboard is not written to: --tensorboard needs the tensorboard package" in capsys.readouterr().err


def test_a_file_in_place_of_a_runs_folder_is_refused_with_the_folder(begun):
    with pytest.raises(UsageError, match=f"is a file: give the folder of a run, such as {begun}"):
        records.last(begun / "checkpoint.npz")


def test_another_number_of_epochs_is_refused_where_the_schedule_depends_on_it(tmp_path):
    train("scratch", out=tmp_path, epochs=1, schedule="cosine")
    with pytest.raises(UsageError, match="its cosine schedule ends with epoch 1, which"):
        train("scratch", resume=tmp_path, epochs=2, schedule="cosine")


def test_the_arrays_of_another_network_are_refused_though_the_settings_agree(begun):
    arrays, facts = checkpoint.load(begun / "checkpoint.npz")
    checkpoint.save(begun / "checkpoint.npz", {**arrays, "W1": np.zeros((6, 1, 5, 5), np.float32)}, facts)
    before = files(begun)
    with pytest.raises(Error, match="holds the parameters of another network"):
        train("scratch", resume=begun)
    assert files(begun) == before


@pytest.mark.parametrize("harm", ["cut", "altered"])
def test_a_harmed_checkpoint_is_refused_in_one_line_and_nothing_is_overwritten(harm, begun):
    path = begun / "checkpoint.npz"
    content = path.read_bytes()
    path.write_bytes(content[:-1] if harm == "cut" else content[:1000] + b"\0\1\2" + content[1003:])
    before = files(begun)
    for options in ({"resume": begun}, {"out": begun}):
        with pytest.raises((Error, UsageError), match="is no whole checkpoint|a run is there already") as caught:
            train("scratch", **options)
        assert "\n" not in str(caught.value) and files(begun) == before


def test_a_folder_that_was_refused_is_not_left_locked(begun):
    with pytest.raises(UsageError, match="a run is there already"):
        train("scratch", out=begun)
    assert len(train("scratch", resume=begun, epochs=2)) == 2


def test_a_checkpoint_of_another_version_is_refused(begun):
    arrays, facts = checkpoint.load(begun / "checkpoint.npz")
    checkpoint.save(begun / "checkpoint.npz", arrays, {**facts, "format": 99})
    with pytest.raises(Error, match="of another version"):
        train("scratch", resume=begun)


@pytest.mark.parametrize(
    "wrong",
    [None, [], {}, "x", {"devices": ["tpu(0)"]}, {"devices": 3}, {"devices": []}, {"lr": "x"}, {"impl": "os"}],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused_in_one_line_with_its_path(wrong, begun, tmp_path):
    config = json.loads((begun / "config.json").read_text())
    content = json.dumps({**config, **wrong} if wrong and isinstance(wrong, dict) else wrong)
    (tmp_path / "config.json").write_text(content if wrong is not None else "{")
    for read in (records.options, lambda folder: train("scratch", resume=folder)):
        with pytest.raises(Error) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_second_run_into_a_folder_is_refused_while_the_first_goes_on(tmp_path):
    command = [sys.executable, str(SCRIPT), "--dataset", "synthetic", "--device", "cpu", "--gpus", "2"]
    first = subprocess.Popen([*command, "--out", str(tmp_path), "--epochs", "500"], stdout=subprocess.PIPE)
    try:
        first.stdout.readline()
        for option in ("--out", "--resume"):
            second = subprocess.run([*command, option, str(tmp_path)], capture_output=True, text=True)
            assert second.returncode == 2 and second.stderr.endswith("another run is writing there: let it end\n")
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
        first.stdout.close()


RUN = (
    "--dataset",
    "synthetic",
    "--device",
    "cpu",
    "--gpus",
    "2",
    "--limit",
    "600",
    "--batch-size",
    "64",
    "--seed",
    "2",
)
BEYOND_OPTIONS = ("--momentum", "0.9", "--weight-decay", "0.001", "--schedule", "cosine", "--warmup-epochs", "0.5")


def start(*options):
    command = [sys.executable, str(SCRIPT), *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed_and_resumed(kills, tmp_path):
    """Kill runs of 12 epochs at random moments, from before the first file to the last, and end each one: asserts that
    it has the bits of a run that was left alone. Returns how many epochs the runs had done when they were killed."""
    options, out = (*RUN, *BEYOND_OPTIONS, "--lr", "0.1", "--epochs", "12"), tmp_path / "whole"
    began = time.monotonic()
    alone = start(*options, "--out", out)
    assert alone.stdout.readline().startswith("running on")
    until_training = time.monotonic() - began
    assert alone.wait() == 0
    training = time.monotonic() - began - until_training
    expected, moments, done = left(out), random.Random(1), []
    for kill in range(kills):
        folder = tmp_path / f"run{kill}"
        run = start(*options, "--out", folder)
        if kill:
            run.stdout.readline()
            time.sleep(training * moments.random())
        else:
            time.sleep(until_training * 0.5)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        whole = (folder / "checkpoint.npz").exists()
        done.append(len(checkpoint.load(folder / "checkpoint.npz")[1]["history"]) if whole else 0)
        begun = (folder / "config.json").exists()
        again = start("--resume", folder) if begun else start(*options, "--out", folder)
        _, said = again.communicate()
        assert again.returncode == 0, said
        assert_same_bits(left(folder), expected)
        assert sorted(os.listdir(folder)) == sorted(records.FILES), "a file of the killed run is left"
    return done


def test_runs_killed_at_random_moments_and_resumed_end_with_the_bits_of_a_whole_one(tmp_path):
    killed_and_resumed(3, tmp_path)


@pytest.mark.slow
def test_twenty_runs_killed_at_random_moments_and_resumed_end_with_the_bits_of_a_whole_one(tmp_path):
    done = killed_and_resumed(20, tmp_path)
    assert len(set(done)) > 5, "the moments differed"


def test_a_run_killed_before_its_first_checkpoint_begins_again_from_its_seed(whole, monkeypatch, tmp_path):
    def dies(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(scratch.Replicas, "train_batch", dies)
        with pytest.raises(MemoryError):
            train("scratch", out=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    train("scratch", resume=tmp_path)
    assert_same_bits(left(tmp_path), whole["scratch", False])


def test_what_a_run_left_half_written_when_it_was_killed_is_removed_on_resume(begun):
    for name in records.FILES:
        (begun / f".{name}.abc123.part").write_bytes(b"half")
    (begun / ".config.json.swp").write_bytes(b"an editor's")
    train("scratch", resume=begun, epochs=2)
    assert sorted(files(begun)) == [".config.json.swp", *sorted(records.FILES)]


def test_the_command_goes_on_with_the_runs_own_settings_and_devices(begun):
    run = start("--resume", begun, "--epochs", 2)
    printed, said = run.communicate()
    assert run.returncode == 0 and "running on: [cpu(0), cpu(1)]" in printed and "epoch 2, time" in printed, said
    config = json.loads((begun / "config.json").read_text())
    assert (config["lr"], config["batch_size"], config["epochs"]) == (0.1, 64, 2)
