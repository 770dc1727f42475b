"""However a run ended, it can be resumed, and its result is the same as that of an uninterrupted run."""

import json
import os
import shutil
import signal

import interrupts
import numpy as np
import pytest
from mxnet import nd
from small_networks import dense, softmax_regression

from gluon_mgpu import IMPLS, implementations, scratch
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint, records
from gluon_mgpu.training.replicas import Replicas

STEP = {"schedule": "step", "milestones": (1, 2), "gamma": 0.5}
EXTRAS = {"momentum": 0.9, "weight_decay": 0.001, "max_grad_norm": 1.0, "grad_accum_steps": 2, **STEP}
KINDS = {"plain": {}, "extras": EXTRAS}
BATCH, LR = 32, 0.1
SIZE = {"dataset": "synthetic", "limit": 300, "epochs": 3, "seed": 2, "device": "cpu"}  # 10 steps per epoch


def train(impl="scratch", devices=2, batch_size=BATCH, **options):
    return implementations.train(impl, devices, batch_size, LR, **{**SIZE, **options})


def interrupted(impl, at_step, by=signal.SIGINT, **options):
    """Train until a signal arrives while step number `at_step`, counted from here, is issued."""
    with interrupts.at_step(at_step, (by, 0)):
        train(impl, **options)


def killed(monkeypatch, **options):
    """Begin a run that ends like a killed process, before its first step."""
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(Replicas, "train_batch", lambda *_: 1 / 0)
        train("scratch", **options)


def results(folder):
    """(arrays, losses, accuracies and learning rates) of a run: everything but its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("train_loss", "test_accuracy", "learning_rate")
    return records.last(folder)[0], [[line[name] for name in names] for line in lines]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Results of runs that nothing interrupted: {(impl, "plain" or "extras"): results}."""
    runs = {}
    for impl in IMPLS:
        for kind, options in KINDS.items():
            out = tmp_path_factory.mktemp("whole") / "run"
            train(impl, out=out, **options)
            runs[impl, kind] = results(out)
    return runs


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "run"
    train(out=folder, epochs=2)
    return folder


@pytest.fixture
def begun(two_epochs, tmp_path):
    """The folder of a finished run of two epochs."""
    return shutil.copytree(two_epochs, tmp_path / "run")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind, at_steps", [*(("extras", [n]) for n in (1, 10, 30)), *((k, [7, 6, 7]) for k in KINDS)])
def test_a_run_interrupted_at_any_step_and_resumed_has_the_bits_of_a_whole_run(impl, kind, at_steps, whole, tmp_path):
    options, done = KINDS[kind], 0
    for at_step, by in zip(at_steps, (signal.SIGINT, signal.SIGTERM, signal.SIGINT)):
        interrupted(impl, at_step, by, **{"resume" if done else "out": tmp_path}, **options)
        done += at_step
        facts = checkpoint.load(tmp_path / "checkpoint.npz")[1]
        assert len(facts["history"]) * 10 + facts["steps"] == done
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    train(impl, resume=tmp_path, **options)
    np.testing.assert_equal(results(tmp_path), whole[impl, kind])


def test_a_finished_run_can_be_given_more_epochs(whole, begun, capsys):
    train(resume=begun, epochs=2)
    assert "epochs=3" in capsys.readouterr().err
    train(resume=begun)
    np.testing.assert_equal(results(begun), whole["scratch", "plain"])
    assert records.recorded_options(begun)["epochs"] == 3


def test_a_run_of_the_previous_version_is_resumed_with_the_same_bits(whole, tmp_path):
    interrupted("highlevel", 13, out=tmp_path, **EXTRAS)
    old = {new: name for name, new in records.RENAMED.items()}
    config = json.loads((tmp_path / "config.json").read_text())
    config = {old.get(name, name): value for name, value in config.items() if name != "tune"}
    assert {"clip_norm", "accumulate", "step_epochs", "step_factor"} <= config.keys()
    resave(tmp_path, config=config)
    train("highlevel", resume=tmp_path, **EXTRAS)
    np.testing.assert_equal(results(tmp_path), whole["highlevel", "extras"])


def test_a_run_killed_before_its_first_checkpoint_is_started_again_in_the_same_folder(whole, monkeypatch, tmp_path):
    killed(monkeypatch, out=tmp_path)
    assert not files(tmp_path) and not records.exists(tmp_path)
    with pytest.raises(UsageError):
        train(resume=tmp_path)
    train(out=tmp_path)
    np.testing.assert_equal(results(tmp_path), whole["scratch", "plain"])


OF_SCRATCH = [(("scratch", 2), then) for then in (("highlevel", 2), ("scratch", 1), ("highlevel", 4))]
OF_HIGHLEVEL = [(("highlevel", 2), then) for then in (("scratch", 2), ("highlevel", 3))]


@pytest.mark.parametrize("first, then", [*OF_SCRATCH, *OF_HIGHLEVEL], ids=str)
def test_another_lesson_or_number_of_devices_gives_the_same_to_rounding_and_is_said(first, then, tmp_path, capsys):
    # Without a ReLU, which switches on or off if rounding changes the sign of its input, rounding can be bounded.
    zeros = [nd.zeros((10, 784)), nd.zeros(10)]
    own = implementations.load("scratch", lenet=softmax_regression, init_params=lambda: zeros)
    lessons = {"scratch": own, "highlevel": implementations.load("highlevel", lenet=dense)}
    for run, impl, devices in (("whole", *first), ("run", *first)):
        options = {**EXTRAS, "devices": devices, "out": tmp_path / run}
        train(lessons[impl], **options) if run == "whole" else interrupted(lessons[impl], 13, **options)
    capsys.readouterr()
    impl, devices = then
    train(lessons[impl], devices, resume=tmp_path / "run", **EXTRAS)
    said = capsys.readouterr().err.splitlines()[-1]
    changed = {name for name, before, after in zip(("impl", "devices"), first, then) if before != after}
    assert {name for name in records.MAY_CHANGE if f"{name} " in said} == changed
    # A gradient sums 32 examples, with scores that sum 784 products. Each of 30 updates, none longer than lr (clipping)
    # and multiplied by up to 1 / (1 - momentum), adds the rounding errors of both sums.
    atol = 30 * 0.1 / (1 - 0.9) * (32 + 784) * np.finfo(np.float32).eps
    found, expected = (records.last(tmp_path / run)[0] for run in ("run", "whole"))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=atol)
    assert np.abs(expected["p0"]).max() > 20 * atol


def test_a_finished_run_is_left_unchanged_whatever_it_is_resumed_with(begun, capsys):
    before = files(begun)
    capsys.readouterr()
    for impl, devices in (("scratch", 2), ("highlevel", 3)):
        assert [e.epoch for e in train(impl, devices, resume=begun, epochs=2)] == [1, 2]
        assert capsys.readouterr().out == "" and files(begun) == before
    (begun / ".config.json.swp").write_bytes(b"an editor's")
    for name in ("config.json", "metrics.jsonl", "curves.png"):  # as if killed after the last checkpoint
        (begun / name).rename(begun / f".{name}.abc123.part")
    train(resume=begun, epochs=2)
    assert files(begun) == {**before, ".config.json.swp": b"an editor's"}


def test_a_run_is_resumed_as_it_was_if_only_its_folder_is_given(tmp_path, whole):
    interrupted("scratch", 13, out=tmp_path, **EXTRAS)
    assert len(implementations.train(resume=tmp_path)) == 3
    np.testing.assert_equal(results(tmp_path), whole["scratch", "extras"])


def test_a_killed_run_remembers_the_epochs_and_devices_it_was_resumed_with(begun, monkeypatch):
    killed(monkeypatch, devices=3, resume=begun, epochs=5)
    assert records.recorded_options(begun).items() >= {"epochs": 5, "num_gpus": [0, 1, 2]}.items()


OTHER = [{"dataset": "fashion-mnist"}, {"seed": 3}, {"batch_size": 16}, {"model": "lenet-max", "impl": "highlevel"}]


@pytest.mark.parametrize("other", [*OTHER, {"epochs": 1}, {"out": "elsewhere"}], ids=str)
def test_settings_that_differ_from_the_runs_are_refused_by_name_and_nothing_is_overwritten(other, begun):
    before = files(begun)
    with pytest.raises(UsageError) as caught:
        train(**{"resume": begun, **other})
    assert str(caught.value).startswith(f"{next(iter(other))}=") and files(begun) == before


def test_other_epochs_are_refused_if_the_schedule_depends_on_them(tmp_path):
    train(out=tmp_path, epochs=1, schedule="cosine")
    with pytest.raises(UsageError):
        train(resume=tmp_path, epochs=2, schedule="cosine")


def test_a_folder_that_holds_a_file_of_a_run_is_neither_overwritten_nor_left_locked(tmp_path):
    for name in records.FILES:
        (tmp_path / name).write_text("mine")
        with pytest.raises(UsageError) as caught:
            train(out=tmp_path)
        assert "--" not in str(caught.value) and files(tmp_path) == {name: b"mine"}
        (tmp_path / name).unlink()
    train(out=tmp_path, epochs=1)


def test_a_folder_that_a_run_is_writing_to_is_refused(begun):
    with records.RunFolder(resume=begun):
        for option in ("out", "resume"):
            with pytest.raises(UsageError):
                train(**{option: begun})
    train(resume=begun, epochs=2)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_a_runs_folder_is_replaced_and_what_it_names_is_left_unchanged(exists, begun, tmp_path):
    victims = tmp_path / "victims"
    victims.mkdir()
    for name in (*records.FILES, f".metrics.jsonl.{os.getpid()}.part"):
        path = begun / name
        if exists or name == "checkpoint.npz":
            (victims / name).write_bytes(path.read_bytes() if path.exists() else b"")
        path.unlink(missing_ok=True)
        path.symlink_to(victims / name)
    before = files(victims)
    train(resume=begun)
    assert files(victims) == before and not any(path.is_symlink() for path in begun.iterdir())


def resave(folder, arrays=None, **facts):
    old_arrays, old_facts = checkpoint.load(folder / "checkpoint.npz")
    checkpoint.save(folder / "checkpoint.npz", {**old_arrays, **(arrays or {})}, {**old_facts, **facts})


def reconfigure(folder, **changed):
    resave(folder, config={**checkpoint.load(folder / "checkpoint.npz")[1]["config"], **changed})


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "checkpoint.npz", 100),
        lambda folder: resave(folder, format=99),  # from a later version
        lambda folder: resave(folder, history=[{}]),
        lambda folder: resave(folder, history=[dict.fromkeys(records.Epoch._fields, "\x1b[31m")]),
        lambda folder: resave(folder, steps="3"),
        lambda folder: reconfigure(folder, devices=["tpu(0)"]),
        lambda folder: reconfigure(folder, limit=5 * 10**9),
        lambda folder: reconfigure(folder, shares=[10**400]),
        lambda folder: resave(folder, {"W1": np.zeros((6, 1, 5, 5), np.float32)}),
        lambda folder: resave(folder, {"W9": np.zeros(3, np.float32)}),
    ],
    ids="truncated version history text steps device limit shares shape W9".split(),
)
def test_a_checkpoint_that_cannot_be_used_is_an_error_with_its_path_and_nothing_is_overwritten(damage, begun):
    damage(begun)
    before = files(begun)
    with pytest.raises(Error) as caught:
        train(resume=begun)
    assert str(begun / "checkpoint.npz") in str(caught.value) and "\n" not in str(caught.value)
    assert files(begun) == before


def test_a_path_that_is_not_a_run_is_a_usage_error_that_names_the_run_nearby(begun):
    for path in (begun / "checkpoint.npz", begun.parent):
        with pytest.raises(UsageError, match=str(begun)):
            records.last(path)
    with pytest.raises(UsageError):
        records.last("nowhere")


def test_parameters_that_are_not_numbers_do_not_replace_the_last_checkpoint(begun, monkeypatch):
    def sgd(params, lr, batch_size):
        params[1][:] = np.nan  # a ReLU hides the NaN from the loss
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(scratch, "sgd", sgd)
    with pytest.raises(Error):
        train(resume=begun)
    state, facts = checkpoint.load(begun / "checkpoint.npz")
    assert len(facts["history"]) == 2 and all(np.isfinite(array).all() for array in state.values())
