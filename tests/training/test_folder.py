"""A run writes to its own folder and to no other, and only its own data and lesson continue it."""

import importlib.util
import json
import os
import shutil
from pathlib import Path

import interrupts
import numpy as np
import pytest
from runs import gluon_mgpu, refuses

from gluon_mgpu import evaluate, scratch
from gluon_mgpu import train as training
from gluon_mgpu.data import datasets, own_data
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import checkpoint, lessons
from gluon_mgpu.training.record import read

CODE = Path(scratch.__file__).read_text()


def train(impl="scratch", **options):
    defaults = {"dataset": "synthetic", "limit": 100, "epochs": 1, "seed": 0, "device": "cpu"}
    return training(impl, 1, 50, 0.1, **{**defaults, **options})


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_whose_folder_was_moved_fails_and_writes_neither_to_it_nor_to_what_replaced_it(resumed, tmp_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    if resumed:
        train(out=folder)

    def move():
        folder.rename(moved)
        before.update(files(moved))
        if resumed:
            folder.mkdir()
            (folder / "checkpoint.npz").write_bytes(b"another run")

    before = {}
    with pytest.raises(Error), interrupts.in_step(1, move):
        train(**{"resume" if resumed else "out": folder}, epochs=2)
    assert files(moved) == before
    assert files(folder) == {"checkpoint.npz": b"another run"} if resumed else not folder.exists()


@pytest.mark.slow
def test_a_run_whose_folder_was_deleted_fails_and_does_not_create_it_again(tmp_path):
    with pytest.raises(Error), interrupts.in_step(1, lambda: shutil.rmtree(tmp_path / "run")):
        train(out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["", "/own"], ids=["at import", "in a step"])
def test_a_lesson_that_changes_the_working_folder_resumes_the_run_that_was_named(where, tmp_path, monkeypatch):
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    for folder in (outer, inner):
        folder.mkdir()
        monkeypatch.chdir(folder)
        train(out="run", seed=1 + (folder == inner))
    before = files(inner / "run")
    change = f"import os\nos.chdir({str(inner)!r})\n"
    code = CODE.replace("    losses = f", f"    import os\n    os.chdir({str(inner)!r})\n    losses = f")
    (inner / "own.py").write_text(code if where else f"{CODE}\n{change}")
    monkeypatch.chdir(outer)
    train("../inner/own.py", resume="run", out=str(outer / "run"), epochs=2, seed=None)
    assert files(inner / "run") == before and len(read(outer / "run").position.history) == 2


SHAPE = (40, 3, 8, 12)


def own(shape=SHAPE, labels="int64", seed=0):
    rng = np.random.default_rng(seed)
    images, y = rng.integers(0, 255, SHAPE).astype(np.uint8).reshape(shape), rng.integers(0, 3, 40).astype(labels)
    return images, y, images, y


LINEAR = """
SHAPES = [(10, 288)]


def lenet(X, params):
    return nd.FullyConnected(nd.flatten(X), *params, num_hidden=10)


def init_params():
    return [nd.random.normal(scale=0.01, shape=SHAPES[0]), nd.zeros(10)]
"""


@pytest.fixture(scope="module")
def of_own_data(tmp_path_factory):
    """(the lesson, the folder of its run on own data)"""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(CODE + LINEAR)
    train(str(folder / "own.py"), dataset=datasets.own(*own()), limit=None, out=folder / "run")
    return str(folder / "own.py"), folder / "run"


def test_a_run_is_neither_resumed_nor_evaluated_on_data_of_other_shapes_or_values(of_own_data, tmp_path):
    lesson, folder = of_own_data
    for change in ({"shape": (40, 3, 12, 8)}, {"seed": 1}):
        np.savez(tmp_path / "data.npz", **dict(zip(own_data.PARTS, own(**change))))
        refuses("data_dir", train, lesson, resume=folder, epochs=2, dataset=datasets.own(*own(**change)), limit=None)
        refuses("data_dir", evaluate.held_out, read(folder), tmp_path / "data.npz")


def test_labels_of_another_type_are_the_same_data_and_their_classes_are_those_in_the_report(of_own_data, tmp_path):
    lesson, folder = of_own_data
    run, data = shutil.copytree(folder, tmp_path / "run"), own(labels="int32")
    train(lesson, resume=run, epochs=2, dataset=datasets.own(*data), limit=None)
    np.savez(tmp_path / "data.npz", **dict(zip(own_data.PARTS, data)))
    evaluate.held_out(read(run), tmp_path / "data.npz")
    report = evaluate.report(evaluate.load(run, lesson, device="cpu"), *data[2:])
    assert all(len(line.split()) == 5 for line in report.splitlines()[-3:])  # a class, three counts, the recall


def as_earlier_versions_recorded(folder, data, **changes):
    """Rewrite a checkpoint with the checksum that was recorded before there were digests."""
    arrays, facts = checkpoint.load(folder / "checkpoint.npz")
    del facts["config"]["data_digest"]
    facts["config"] |= {"data_checksum": data.checksum(), **changes}
    (folder / "checkpoint.npz").write_bytes(checkpoint.packed(arrays, facts))


def test_a_run_of_an_earlier_version_is_resumed_on_its_data_and_on_no_other(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    train("own.py", out="run")
    as_earlier_versions_recorded(tmp_path / "run", datasets.load("synthetic", None, 100, 0), impl="own.py")
    with pytest.raises(UsageError):
        train("own.py", resume="run", epochs=2, dataset=datasets.load("synthetic", None, 100, 1), limit=100)
    capsys.readouterr()
    train("./own.py", resume="run", epochs=2)
    assert capsys.readouterr().err.count("\n") == 1  # it is resumed; nothing has changed
    assert len(json.loads((tmp_path / "run/config.json").read_text())["data_digest"]) == 64


def test_an_own_lesson_is_the_same_one_if_its_file_is_whatever_its_path_is_relative_to(tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(CODE)
    monkeypatch.chdir(tmp_path / "a")
    train("own.py", out=tmp_path / "run")
    for folder, impl, said in (("b", "../a/own.py", False), ("b", "own.py", True)):
        monkeypatch.chdir(tmp_path / folder)
        capsys.readouterr()
        train(impl, resume=tmp_path / "run", epochs=len(read(tmp_path / "run").position.history) + 1)
        assert capsys.readouterr().err.count("\n") == 1 + said


MLP = """

SIZES = [784, 16, 16, 16, 10]


def init_params():
    weights = [nd.random.normal(scale=0.1, shape=(b, a)) for a, b in zip(SIZES, SIZES[1:])]
    return [p for w in weights for p in (w, nd.zeros(w.shape[0]))]


def lenet(X, params):
    for w, b in zip(params[::2], params[1::2]):
        X = nd.FullyConnected(X, w, b, num_hidden=b.shape[0])
    return X
"""


@pytest.mark.parametrize("code, first", [(CODE, "W1"), (CODE + MLP, "p0")], ids=["LeNet", "MLP"])
def test_only_a_network_like_lenet_has_lenets_names_and_a_run_with_former_names_is_resumed(code, first, tmp_path):
    (tmp_path / "own.py").write_text(code)
    train(str(tmp_path / "own.py"), out=tmp_path / "run", epochs=1)
    arrays, facts = checkpoint.load(tmp_path / "run/checkpoint.npz")
    assert next(iter(arrays)) == first and len(arrays) == 8
    former = dict(zip(("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"), arrays.values()))
    (tmp_path / "run/checkpoint.npz").write_bytes(checkpoint.packed(former, facts))
    train(str(tmp_path / "own.py"), resume=tmp_path / "run", epochs=2)
    train(str(tmp_path / "own.py"), out=tmp_path / "whole", epochs=2)
    np.testing.assert_equal(read(tmp_path / "run").arrays, read(tmp_path / "whole").arrays)


@pytest.mark.parametrize("where", ["at import", "in a step"])
def test_a_lesson_that_ends_the_program_is_an_error_never_status_0(where, tmp_path):
    in_step = CODE.replace("    losses = f", "    raise SystemExit\n    losses = f")
    (tmp_path / "own.py").write_text(f"{CODE}\nraise SystemExit\n" if where == "at import" else in_step)
    with pytest.raises(Error, match="own.py"):
        train(str(tmp_path / "own.py"))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "check"])
def test_a_command_whose_file_ends_the_program_has_status_1(command, tmp_path):
    (tmp_path / "own.py").write_text(f"{CODE}\nimport sys\nsys.exit(0)\n")
    words = ["--impl", "own.py", "--dataset", "synthetic"] if command == "train" else ["own.py"]
    done = gluon_mgpu(command, *words, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("error: ")) == (1, 1)


@pytest.mark.parametrize("given", [{"hybridize": True}, {"momentum": 0}], ids=str)
def test_a_setting_that_the_lesson_does_not_have_is_refused_even_with_its_default(given):
    refuses(next(iter(given)), train, **given)
    train("highlevel", **given)


def test_a_lesson_imports_the_module_beside_it_whatever_an_earlier_one_imported(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "beside_lesson.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / "gluon_mgpu.py").write_text(f"{CODE}\nimport beside_lesson\n")
        path = str(tmp_path / name / "gluon_mgpu.py")
        lesson = lessons.load(path)
        assert lesson.beside_lesson.NAME == name and lessons.name_of(lesson) == path


def test_an_imported_copy_of_scratch_is_an_own_lesson(tmp_path):
    shutil.copy(scratch.__file__, tmp_path / "scratch.py")
    spec = importlib.util.spec_from_file_location("scratch", tmp_path / "scratch.py")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert lessons.name_of(copy) == str(tmp_path / "scratch.py")
    train(copy, out=tmp_path / "run")
    refuses("resume", training, resume=tmp_path / "run", epochs=2)  # a checkpoint does not choose code to run
    with pytest.raises(UsageError):
        evaluate.load(tmp_path / "run")


def test_a_lesson_called_like_the_package_keeps_its_name(tmp_path, monkeypatch):
    (tmp_path / "gluon_mgpu.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    assert lessons.name_of(lessons.load("gluon_mgpu.py")) == "gluon_mgpu.py"
    assert os.path.samefile(lessons.describe(lessons.load("gluon_mgpu.py")).full_name, "gluon_mgpu.py")
