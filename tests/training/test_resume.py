"""However a run ended, it can be resumed, and its result is the same as that of an uninterrupted run."""

import json
import os
import random
import shutil
import signal
import tempfile
from pathlib import Path

import interrupts
import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from runs import FEEDBACK, refuses

from gluon_mgpu import scratch
from gluon_mgpu import train as training
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import checkpoint, lessons, loop
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.folder import FILES, opened
from gluon_mgpu.training.record import Epoch, exists, read
from gluon_mgpu.training.workers import Group

EXTRAS = {"momentum": 0.9, "weight_decay": 0.001, "warmup_epochs": 1.5}


def noisy(device_params, Xs, ys):
    """scratch.forward_backward on images with noise of all three generators."""
    Xs = [X + nd.random.normal(scale=0.1, shape=X.shape, ctx=X.context) + np.random.normal() for X in Xs]
    return scratch.forward_backward(device_params, [X * random.uniform(0.5, 1) for X in Xs], ys)


def feedback_lesson(folder):
    """The path of scratch.py with arrays that each device keeps, and hands to the checkpoint."""
    path = Path(folder, "feedback.py")
    path.write_text(Path(scratch.__file__).read_text() + FEEDBACK)
    return str(path)


# {name: the lesson and the settings of a run}. tests/test_features.py resumes other kinds of runs.
RUNS = {
    "scratch": ("scratch", {}),
    "highlevel": ("highlevel", EXTRAS),
    "noise": (lessons.load("scratch", forward_backward=noisy), {}),
    "state": (feedback_lesson(tempfile.mkdtemp()), {}),
}
BATCH, LR = 16, 0.1
SIZE = {"dataset": "synthetic", "limit": 150, "epochs": 3, "seed": 2, "device": "cpu"}  # 10 steps per epoch


def train(impl="scratch", devices=2, batch_size=BATCH, **options):
    return training(impl, devices, batch_size, LR, **{**SIZE, **options})


def killed(**options):
    """Begin a run that ends like a killed process, before its first step."""
    with pytest.raises(ZeroDivisionError), interrupts.in_step(1, lambda: 1 / 0):
        train("scratch", **options)


def config(folder):
    return read(folder).config


def results(folder):
    """(arrays, losses, accuracies and learning rates) of a run: everything but its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("train_loss", "test_accuracy", "learning_rate")
    return read(folder).arrays, [[line[name] for name in names] for line in lines]


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Whole(dict):
    """{name: results of the run of RUNS that nothing interrupted}, which is trained when it is needed."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, name):
        impl, options = RUNS[name]
        train(impl, out=self.folder / name, **options)
        self[name] = results(self.folder / name)
        return self[name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "run"
    train(out=folder, epochs=2)
    return folder


@pytest.fixture
def begun(two_epochs, tmp_path):
    """The folder of a finished run of two epochs."""
    return shutil.copytree(two_epochs, tmp_path / "run")


@pytest.mark.parametrize(
    "name, at_steps",
    [
        ("highlevel", [7, 6, 7]),
        *(pytest.param(name, [7, 6, 7], marks=pytest.mark.slow) for name in [*RUNS][2:]),
        *(pytest.param("highlevel", [n], marks=pytest.mark.slow) for n in (1, 10, 30)),
    ],
)
def test_a_run_interrupted_at_any_step_and_resumed_has_the_bits_of_a_whole_run(name, at_steps, whole, tmp_path):
    (impl, options), done = RUNS[name], 0
    for at_step, by in zip(at_steps, (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)):
        with interrupts.at_step(at_step, (by, 0)):
            train(impl, **{"resume" if done else "out": tmp_path}, **options)
        done += at_step
        facts = checkpoint.load(tmp_path / "checkpoint.npz")[1]
        assert len(facts["history"]) * 10 + facts["steps"] == done
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    train(impl, resume=tmp_path, **options)
    np.testing.assert_equal(results(tmp_path), whole[name])


COUNTER = """

class Counter:
    steps = 0


counter, update = Counter(), sgd


def sgd(*args):
    counter.steps += 1
    update(*args)
    other[:] += 1


kept, other = nd.zeros(2), nd.zeros(2)


def state(device):
    return {"v": kept}
"""


def test_only_values_that_a_lesson_changes_in_each_step_and_leaves_out_of_its_state_are_named(tmp_path, capsys):
    train(feedback_lesson(tmp_path), out=tmp_path / "feedback", epochs=1, devices=1)
    assert "rests" not in capsys.readouterr().err
    (tmp_path / "own.py").write_text(Path(scratch.__file__).read_text() + COUNTER)
    train(str(tmp_path / "own.py"), out=tmp_path / "run", epochs=1, devices=1)
    said = capsys.readouterr().err
    assert "counter, other" in said and "kept" not in said


STATE_OF_STEPS = """

import numpy as np

made, original = {}, forward_backward


def forward_backward(*args):
    made["v"] = nd.ones(2)
    return original(*args)


def state(%s):
    return %s
"""


@pytest.mark.parametrize(
    "argument, returned",
    [
        ("", "{'v': np.ones(2)}"),
        ("device", "None"),
        ("device", "{'v': np.ones(2)}"),
        pytest.param("device", "made", id="filled in the first step"),
        pytest.param("device", "{'v': nd.ones(2)}", id="a copy"),
    ],
)
def test_a_state_that_cannot_be_saved_is_a_usage_error_that_names_the_file_and_the_function(
    argument, returned, tmp_path
):
    path = tmp_path / "own.py"
    path.write_text(Path(scratch.__file__).read_text() + STATE_OF_STEPS % (argument, returned))
    assert refuses(None, train, str(path), out=tmp_path / "run", epochs=1).value == f"{path}: state"
    assert not exists(tmp_path / "run")


def test_a_state_of_any_values_is_accepted_and_left_as_it_is(tmp_path):
    values = "[0, 1, -1, 1e9, 3e38, np.inf, np.nan]"
    path = tmp_path / "own.py"
    own = f"\n\nimport numpy as np\n\nkept = nd.array({values})\n\n\ndef state(device):\n    return {{'v': kept}}\n"
    path.write_text(Path(scratch.__file__).read_text() + own)
    train(str(path), out=tmp_path / "run", epochs=1, devices=1)
    arrays, _ = checkpoint.load(tmp_path / "run" / "checkpoint.npz")
    np.testing.assert_array_equal(arrays["state/0/0/v"], np.array([0, 1, -1, 1e9, 3e38, np.inf, np.nan], np.float32))


@pytest.mark.slow
def test_a_lessons_state_is_refused_on_other_devices_and_by_a_lesson_without_state(tmp_path):
    train(feedback_lesson(tmp_path), out=tmp_path / "run", epochs=1)
    for impl, devices in ((feedback_lesson(tmp_path), 3), ("scratch", 2)):
        with pytest.raises(Error):
            train(impl, devices, resume=tmp_path / "run")


def test_versions_that_changed_and_settings_of_other_versions_are_named(begun, capsys):
    reconfigure(begun, numpy="1.0", temperature=3)
    train(resume=begun, epochs=3)
    said = capsys.readouterr().err
    assert all(name in said for name in ("numpy", "temperature"))
    assert json.loads((begun / "config.json").read_text())["numpy"] == np.__version__


@pytest.mark.slow
def test_a_finished_run_can_be_given_more_epochs(whole, begun, capsys):
    train(resume=begun, epochs=2)
    assert "epochs=3" in capsys.readouterr().err
    train(resume=begun)
    np.testing.assert_equal(results(begun), whole["scratch"])
    assert config(begun).epochs == 3


def test_a_run_killed_before_its_first_checkpoint_is_started_again_in_the_same_folder(whole, tmp_path):
    killed(out=tmp_path)
    assert not files(tmp_path) and not exists(tmp_path)
    refuses(None, train, resume=tmp_path)
    train(out=tmp_path)
    np.testing.assert_equal(results(tmp_path), whole["scratch"])


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


@pytest.mark.slow
def test_a_run_whose_epochs_are_reduced_to_the_finished_ones_keeps_that_number(begun):
    reconfigure(begun, epochs=10)
    train(resume=begun, epochs=2)
    assert len(training(resume=begun)) == config(begun).epochs == 2


@pytest.mark.slow
def test_a_killed_run_remembers_the_epochs_and_devices_it_was_resumed_with(begun):
    killed(devices=3, resume=begun, epochs=5)
    assert (config(begun).epochs, config(begun).gpus) == (5, (0, 1, 2))


@pytest.mark.parametrize(
    "given", [{}, {"gpus": "1,2"}, {"epochs": 5}, {"gpus": 3, "device": "auto", "epochs": 3}], ids=str
)
def test_a_resumed_run_has_the_recorded_devices_and_epochs_except_those_that_are_passed(given, begun, monkeypatch):
    reconfigure(begun, epochs=4)
    monkeypatch.setattr(loop, "fit", lambda setup, folder: (setup.run.config, setup.model.ctx))
    found, ctx = training(resume=begun, **given)
    expected = Config(**Config.parse({"gpus": 2, "device": "cpu", "epochs": 4, **given}))
    assert (found.gpus, found.device, found.epochs) == (expected.gpus, expected.device, expected.epochs)
    assert ctx == [mx.cpu(index) for index in expected.gpus]


def test_settings_that_differ_from_the_runs_are_refused_by_name_and_nothing_is_overwritten(begun):
    before = files(begun)
    others = [{"dataset": "fashion-mnist"}, {"seed": 3}, {"batch_size": 32}, {"epochs": 1}, {"out": "elsewhere"}]
    for other in (*others, {"model": "lenet-max", "impl": "highlevel"}):
        refuses(next(iter(other)), train, **{"resume": begun, **other})
        assert files(begun) == before
    train(resume=begun)  # the folder is not left locked


def test_epochs_that_the_recorded_warm_up_or_schedule_does_not_allow_are_the_users_mistake():
    for settings, epochs in (({"warmup_epochs": 3}, 3), ({"schedule": "cosine"}, 5)):
        recorded = Config(epochs=4, **settings)
        refuses("epochs", recorded.resumed, {"epochs": epochs})


def test_a_resumed_run_keeps_its_shares_with_the_same_number_of_devices():
    recorded = Config(gpus=(0, 1), shares=(60, 40))
    assert recorded.resumed({"kvstore": "mpi"}).shares == (60, 40)
    assert recorded.resumed({"gpus": (0, 1, 2)}).shares is None


def test_a_lesson_without_a_setting_of_the_run_is_refused_by_its_name(tmp_path):
    train("highlevel", out=tmp_path, epochs=1, momentum=0.9)
    refuses("impl", train, "scratch", resume=tmp_path)


def test_a_folder_that_holds_a_file_of_a_run_is_neither_overwritten_nor_left_locked(tmp_path):
    for name in FILES:
        (tmp_path / name).write_text("mine")
        assert "--" not in str(refuses("out", train, out=tmp_path))
        assert files(tmp_path) == {name: b"mine"}
        (tmp_path / name).unlink()
    train(out=tmp_path, epochs=1)


def test_a_folder_that_a_run_is_writing_to_is_refused(begun):
    with opened({"resume": begun}, Group()):
        for option in ("out", "resume"):
            refuses(option, train, **{option: begun})
    train(resume=begun, epochs=2)


@pytest.mark.slow
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_a_runs_folder_is_replaced_and_what_it_names_is_left_unchanged(exists, begun, tmp_path):
    victims = tmp_path / "victims"
    victims.mkdir()
    for name in (*FILES, f".metrics.jsonl.{os.getpid()}.part"):
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
    content = checkpoint.packed({**old_arrays, **(arrays or {})}, {**old_facts, **facts})
    (folder / "checkpoint.npz").write_bytes(content)


def reconfigure(folder, **changed):
    resave(folder, config={**checkpoint.load(folder / "checkpoint.npz")[1]["config"], **changed})


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: os.truncate(folder / "checkpoint.npz", 100),
        lambda folder: resave(folder, format=99),  # from a later version
        lambda folder: resave(folder, config={"devices": ["cpu(0)"], "workers": 1}),  # from one of the first versions
        lambda folder: resave(folder, history=[{}]),
        lambda folder: resave(folder, history=[dict.fromkeys(Epoch._fields, "\x1b[31m")]),
        lambda folder: resave(folder, steps="3"),
        lambda folder: resave(folder, steps=-1),
        lambda folder: reconfigure(folder, devices=["tpu(0)"]),
        lambda folder: reconfigure(folder, limit=0),
        lambda folder: reconfigure(folder, seed=None),
        lambda folder: reconfigure(folder, shares=[10**400]),
        lambda folder: resave(folder, {"W1": np.zeros((6, 1, 5, 5), np.float32)}),
        lambda folder: resave(folder, {"W9": np.zeros(3, np.float32)}),
    ],
    ids="truncated later first history text steps negative device limit seed shares shape W9".split(),
)
def test_a_checkpoint_that_cannot_be_used_is_an_error_with_its_path_and_nothing_is_overwritten(damage, begun):
    damage(begun)
    before = files(begun)
    with pytest.raises(Error) as caught:
        train(resume=begun)
    assert str(begun) in str(caught.value) and "\n" not in str(caught.value)
    assert files(begun) == before


def test_a_path_that_is_not_a_run_is_a_usage_error_that_names_the_run_nearby(begun):
    for path in (begun / "checkpoint.npz", begun.parent):
        with pytest.raises(UsageError, match=str(begun)):
            read(path)
    refuses(None, read, "x" * 300)


def test_parameters_that_are_not_numbers_do_not_replace_the_last_checkpoint(begun, monkeypatch):
    def sgd(params, lr, batch_size):
        params[1][:] = np.nan  # a ReLU hides the NaN from the loss
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(scratch, "sgd", sgd)
    with pytest.raises(Error):
        train(resume=begun)
    state, facts = checkpoint.load(begun / "checkpoint.npz")
    assert len(facts["history"]) == 2 and all(np.isfinite(array).all() for array in state.values())
