"""The exercises: each planted wrong answer is diagnosed as its mistake, and correct answers pass."""

import configparser
import csv
import errno
import json
import os
import re
import shutil
import sys
from pathlib import Path

import mxnet as mx
import pytest
import runs

from gluon_mgpu import exercises
from gluon_mgpu.commands.exercise import _csv
from gluon_mgpu.commands.exercise import exercise as command
from gluon_mgpu.exercises import Mistake, answers, cases, diagnosis, grading

# Answers begin with a line "## EXERCISE: MISTAKE" or "## EXERCISE: correct"; see `exercises.edited` for what follows.
# Those in the package are the known mistakes. The others are recognized by rules, or described.
ANSWERS = [
    answer
    for file in (Path(exercises.__file__).with_name("known.txt"), Path(__file__).with_name("answers.txt"))
    for answer in re.findall(r"^## (\w+): (\S+)\n(.*?)(?=^## |\Z)", file.read_text(), re.MULTILINE | re.DOTALL)
]
PLANTED = [answer for answer in ANSWERS if answer[1] != "correct"]
CORRECT = [(name, code) for name, mistake, code in ANSWERS if mistake == "correct"]


def slow_after_the_first(answers):
    """Parameters of a test, which are slow except for the first answer to each exercise."""
    first = {name: answer for answer in reversed(answers) for name in answer[:1]}
    return [pytest.param(*answer, marks=[pytest.mark.slow] * (answer is not first[answer[0]])) for answer in answers]


def found(name, code, path="answer.py"):
    """The mistake in a learner's code, or None."""
    try:
        grading.run_cases(name, code, path)
    except Mistake as mistake:
        grading.report(path, name, mistake)  # the mistake must have an explanation
        return mistake


def diagnosed(name, code):
    """The name of the mistake, or None, in an answer: code that follows our solution, or edits to it."""
    answer = exercises.edited(exercises.solution(name), code)
    assert answer  # otherwise, an edit does not fit
    mistake = found(name, answer)
    return mistake and mistake.name


@pytest.mark.parametrize("name, mistake, code", slow_after_the_first(PLANTED))
def test_a_wrong_answer_is_diagnosed_as_its_mistake(name, mistake, code):
    assert diagnosed(name, code) == mistake


@pytest.mark.parametrize("name", exercises.NAMES)
def test_our_solution_passes_and_what_start_writes_is_an_unfinished_answer(name):
    assert diagnosed(name, "") is None
    assert found(name, exercises.skeleton(name)).name == "unfinished"


@pytest.mark.slow
@pytest.mark.parametrize("name, code", CORRECT)
def test_another_correct_answer_passes(name, code):
    assert diagnosed(name, code) is None


@pytest.mark.slow
def test_what_start_writes_also_runs_on_its_own(tmp_path):
    (tmp_path / "timing.py").write_text(exercises.skeleton("timing"))
    ours, mxnet = r"^(?:import|from) gluon_mgpu", r"^(?:import|from) mxnet"
    for text in map(exercises.skeleton, exercises.NAMES):
        first = re.search(f"{ours}|{mxnet}", text, re.MULTILINE)
        assert not first or re.match(ours, first[0])  # otherwise, current versions of NumPy lack names that MXNet uses
    assert runs.finished(sys.executable, "timing.py", cwd=tmp_path).returncode == 0


def test_every_mistake_that_is_explained_is_planted_and_the_reverse():
    texts = configparser.ConfigParser(interpolation=None)
    texts.read(Path(grading.__file__).with_name("mistakes.ini"))
    own = {name: set(texts._sections[name]) for name in texts.sections()}
    assert own.keys() == {*exercises.NAMES}
    for name, mistakes in own.items():
        planted = {mistake for exercise, mistake, _ in PLANTED if exercise == name}
        assert mistakes <= planted <= mistakes | texts.defaults().keys()
    shared = re.findall(
        r'"([a-z]+(?:-[a-z]+)+)"', Path(cases.__file__).read_text() + Path(diagnosis.__file__).read_text()
    )
    assert {*shared} <= texts.defaults().keys()
    everywhere = {mistake for _, mistake, _ in PLANTED}
    other_tests = {"unfinished", "time-limit", "failed-operator", "ended-early", "not-graded", "memory-limit"}
    assert texts.defaults().keys() - everywhere == other_tests


def test_an_operator_that_fails_later_is_reported():
    code = """
def split_and_load(data, ctx, speeds):
    from mxnet import nd

    return [nd.take(data, nd.array([99]), mode="raise") for _ in ctx]
"""
    assert diagnosed("split", code) == "failed-operator"
    with pytest.raises(mx.MXNetError):  # the other shard's error; otherwise, MXNet would raise it at exit
        mx.nd.waitall()


# Added to our solution: what ends the process early, takes too much, or makes a wrong answer look right
WRONG = "def allreduce(data): pass\n"
CASES = [
    *((WRONG + end, "ended-early") for end in ("import os; os._exit(0)", "import sys; sys.exit(0)")),
    (f"{WRONG}import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended-early"),
    (f"{WRONG}import sys; print('null'); sys.stdout.close()", "not-in-place"),
    (f"{WRONG}import numpy; numpy.allclose = lambda *args, **kwargs: True", "not-in-place"),
    (f"{WRONG}x = bytearray(5 << 30)", "memory-limit"),
    (f"{WRONG}error = OSError('no')\nerror.__notes__ = ['']\nraise error", "error"),
    (f"{WRONG}while True: print('x' * 10**6, end='')", "time-limit"),
]


def graded(answer, folder, **options):
    (folder / "answer.py").write_text(answer)
    [only] = answers.in_file(str(folder / "answer.py"))
    return grading.grade(only, **options)


@pytest.mark.slow
@pytest.mark.parametrize("code, mistake", CASES)
def test_an_answer_is_correct_only_if_all_cases_ran(code, mistake, tmp_path):
    limits = {"seconds": 5} if mistake == "time-limit" else {}
    assert graded(f"{exercises.solution('allreduce')}\n{code}\n", tmp_path, **limits).name == mistake


def run(*words, folder):
    done = runs.gluon_mgpu("exercise", *words, cwd=folder, env={**os.environ, "XDG_CACHE_HOME": str(folder / ".cache")})
    done.stderr = re.sub(r"^\[.*/storage\.cc.*\n", "", done.stderr, flags=re.MULTILINE)  # a line of MXNet 2's log
    return done


def test_an_answer_is_started_once_and_graded_with_its_mistake_until_it_is_correct(tmp_path, capfd):
    file = tmp_path / "allreduce.py"
    started = run("start", "allreduce", folder=tmp_path)
    assert (started.returncode, started.stderr) == (0, "") and file.read_text() == exercises.skeleton("allreduce")
    assert "allreduce.py" in runs.error(capfd, command, "start", "allreduce", "--out", file)

    file.write_text(exercises.solution("allreduce").replace("        mean.copyto(array)", "        print('here')"))
    checked = run("grade", "allreduce.py", "--solution", folder=tmp_path)
    assert (checked.returncode, checked.stderr) == (1, "")
    assert checked.stdout.startswith("here\n") and "Mistake: no-broadcast" in checked.stdout
    assert checked.stdout.endswith(exercises.solution("allreduce"))

    file.write_text(exercises.solution("allreduce"))
    checked = run("grade", "allreduce.py", folder=tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "") and "start step" in checked.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"allreduce.py", ".cache"}


@pytest.mark.slow
def test_what_an_answer_prints_controls_no_terminal(tmp_path, capfd):
    printing = "import sys\nprint('\\x1b[2J\\tred')\nprint('\\x9b1m', file=sys.stderr)\nraise KeyError('\\x1b]0;title')"
    mistake = graded(f"{SUM}\n{printing}", tmp_path)
    out, err = capfd.readouterr()
    text = out + err + grading.report("\x1b[31m.py", "allreduce", mistake)
    assert "\tred" in text and "title" in text and not set("\x1b\x9b") & set(text)


def test_a_file_that_names_no_exercise_is_a_wrong_command(tmp_path, capfd):
    (tmp_path / "answer.py").write_text("x = 1\n")
    assert "answer.py" in runs.error(capfd, command, "grade", tmp_path / "answer.py")


def test_an_answer_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):  # an endless file, a pipe that blocks, a folder
        assert answers.in_file(path)[0].problem


def test_the_page_shows_what_check_prints():
    page = (runs.ROOT / "docs/exercises.md").read_text()
    attempt, printed = (
        re.search(rf"^```{kind}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1] for kind in ("python", "text")
    )
    assert grading.report("allreduce.py", "allreduce", found("allreduce", attempt)) + "\n" == printed


# A class


def notebook(*cells):
    """A notebook. cells: Markdown if they begin with #."""
    kinds = {True: "markdown", False: "code"}
    return json.dumps(
        {"cells": [{"cell_type": kinds[cell[0] == "#"], "source": cell.splitlines(True)} for cell in cells]}
    )


SPLIT, SUM = (f"{exercises.solution(name)}\n# my own\n" for name in ("split", "allreduce"))
NO_COPY = SUM.replace("        mean.copyto(array)", "        pass")
# {file: (its content, [(cell, exercise, mistake)])}
CLASS = {
    "ada/allreduce.py": (SUM, [(None, "allreduce", None)]),
    "ada/old.py": (exercises.skeleton("split"), [(None, "split", "unfinished")]),
    "ada/.ipynb_checkpoints/old.py": (SUM, []),
    "ada/notes.txt": ("", []),
    "bob/bom.py": (f"\ufeff# Bob\nimport mxnet\n\n{NO_COPY}", [(None, "allreduce", "no-broadcast")]),
    "bob/broken.py": (f"{SUM}\n  return (", [(None, "allreduce", "syntax-error")]),
    "bob/lab.ipynb": (
        notebook("# Lab", "x = 1", f"%%time\n{SUM}\n!ls", SPLIT),
        [(3, "allreduce", None), (4, "split", None)],
    ),
    "cy/binary.py": (b"\x89PNG\xff", [(None, None, "no-answer")]),
    "cy/empty.py": ("", [(None, None, "no-answer")]),
    "cy/latin.py": (b"# coding: latin-1\n# \xe9\n" + SUM.encode(), [(None, "allreduce", None)]),
    "cy/numpy.py": ("raise SystemExit", [(None, None, "no-answer")]),
    "cy/swim.ipynb": (notebook('"""Exercise swim: x."""', SPLIT), [(1, None, "no-answer"), (2, "split", None)]),
}


@pytest.mark.slow
def test_a_class_is_checked_file_by_file_and_cell_by_cell(tmp_path):
    for name, (content, _) in {**CLASS, "=dan/work.zip": ("", [])}.items():
        path = tmp_path / "answers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    expected = [(f"answers/{name}", *row) for name, (_, rows) in CLASS.items() for row in rows]
    expected.append(("answers/=dan", None, None, "no-answer"))  # not lost
    checked = run("grade", "answers", "--jobs", "2", "--csv", "results.csv", folder=tmp_path)
    assert (checked.returncode, checked.stderr) == (1, "")
    with open(tmp_path / "results.csv", encoding="utf-8-sig") as file:
        students = list(csv.DictReader(file))
    assert [[row[column] for column in ("student", "points", "allreduce", "split")] for row in students] == [
        ["ada", "1", "correct", "unfinished"],
        ["bob", "2", "correct", "correct"],
        ["cy", "2", "correct", "correct"],
        ["'=dan", "0", "", ""],  # not a formula
    ]
    assert students[3]["without an answer"] == "answers/=dan"
    assert "cy/binary.py" in students[2]["without an answer"] and not students[0]["without an answer"]
    table = r"^ada +no +yes +1\nbob +yes +yes +2\ncy +yes +yes +2\n=dan +0\nsolved +2 +3$"
    assert re.search(table, checked.stdout, re.MULTILINE)
    _, *rows = checked.stdout.splitlines()
    assert " correct; " in rows[len(expected)]  # the line below the table
    for row, (file, cell, exercise, mistake) in zip(rows, expected):
        assert row.startswith(f"{file}, cell {cell} " if cell else f"{file} ") and (exercise or " - ") in row
        assert mistake == "no-answer" or row.endswith(mistake or "correct")


def test_a_learners_own_folders_are_no_students(tmp_path):
    (tmp_path / "a.py").write_text(SUM)
    (tmp_path / "runs").mkdir()
    assert [answer.path for answer in answers.find([str(tmp_path)])] == [str(tmp_path / "a.py")]


def test_links_lead_to_other_folders_of_students_but_to_no_answer_twice(tmp_path, capsys):
    for student in ("answers/ada", "answers/bob", "elsewhere/cy"):
        (tmp_path / student).mkdir(parents=True)
        (tmp_path / student / "a.py").write_text(SUM)
    links = {
        "cy": "../elsewhere/cy",
        "loop": ".",
        "up": "..",
        "again": "ada",
        "bob/loop": "..",
        "bob/all": "/",
        "gone": "x",
    }
    for name, target in links.items():
        (tmp_path / "answers" / name).symlink_to(target)
    found = answers.find([str(tmp_path / "answers")])
    assert [answer.student for answer in found] == ["ada", "bob", "cy"] and not any(answer.problem for answer in found)
    assert capsys.readouterr().err.count("\n") == 5


def test_no_cell_of_the_table_is_a_formula_for_a_spreadsheet():
    files = "=a/b.py", " +1", "-1.py", "@x", "a.py"
    graded = [(answers.Answer(path, problem="none"), Mistake("no-answer", "")) for path in files]
    rows = list(csv.reader(_csv(graded).decode("utf-8-sig").splitlines()))
    assert len(rows) == 6 and sum(cell.startswith("'") for row in rows for cell in row) == 8
    assert not any(cell.strip()[:1] in tuple("=+-@") for row in rows for cell in row)


def test_the_students_in_a_folder_are_the_same_however_its_path_is_written(tmp_path, monkeypatch):
    folder = tmp_path / "class"
    for student in ("ada", "bob"):
        (folder / student).mkdir(parents=True)
    (folder / "ada" / "a.py").write_text(SUM)
    monkeypatch.chdir(folder)
    for path in (".", "./", "../class", "../class/", str(folder)):
        found = answers.find([path])
        assert [(answer.student, bool(answer.problem)) for answer in found] == [("ada", False), ("bob", True)]


def test_a_student_whose_folder_cannot_be_read_is_not_lost(tmp_path, monkeypatch):
    for student in ("ada", "bob"):
        (tmp_path / student).mkdir()
        (tmp_path / student / "a.py").write_text(SUM)
    scandir = os.scandir

    def without_bob(path):
        if os.path.basename(path) == "bob":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", without_bob)  # root may read all folders
    found = answers.find([str(tmp_path)])
    assert [(answer.student, bool(answer.problem)) for answer in found] == [("ada", False), ("bob", True)]


def test_students_of_the_same_name_in_two_folders_are_two(tmp_path):
    for folder in ("monday", "friday"):
        (tmp_path / folder / "ada").mkdir(parents=True)
        (tmp_path / folder / "ada" / "a.py").write_text(SUM)
    found = answers.find([str(tmp_path / "monday"), str(tmp_path / "friday")])
    assert [answer.student for answer in found] == [str(tmp_path / name / "ada") for name in ("monday", "friday")]


@pytest.mark.slow
def test_copies_of_the_package_and_of_our_solutions_are_no_answers_and_their_students_are_not_lost(tmp_path, capsys):
    for student in ("ada/gluon_mgpu-main", "bob/code"):  # a checkout, and the package alone
        target = tmp_path / student / ("gluon_mgpu" if "main" in student else "")
        shutil.copytree(Path(exercises.__file__).parents[1], target, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ada/gluon_mgpu-main/tree.py").write_text(f"{exercises.solution('tree')}# my own\n")
    (tmp_path / "ada/gluon_mgpu-main/tests").mkdir()
    (tmp_path / "ada/gluon_mgpu-main/tests/test_a.py").write_text("x = 1\n")
    (tmp_path / "cy_1234_tree.py").write_text(exercises.solution("tree") + "\n")
    found = answers.find([str(tmp_path)])
    assert [(answer.student, answer.name) for answer in found] == [("ada", "tree"), ("cy", ""), ("bob", "")]
    assert capsys.readouterr().err.count("\n") == 2


def test_files_of_a_learning_platform_belong_to_the_students_in_their_names(tmp_path):
    names = ("ada_1234_tree.py", "ada_LATE_1235_77_ring.py", "Bob Lee_22_assignsubmission_file_tree.py", "tree_2.py")
    for name in names:
        (tmp_path / name).write_text(SUM)
    students = {Path(answer.path).name: answer.student for answer in answers.find([str(tmp_path)])}
    assert [students[name] for name in names] == ["ada", "ada", "Bob Lee", ""]


@pytest.mark.slow
def test_each_student_gets_a_file_with_the_diagnoses_and_points_for_the_exercises_that_count(tmp_path):
    answers = {"ada/a.py": SUM, "ada/b.py": SPLIT, "bob/a.py": NO_COPY, "bob-3/a.py": SUM, "bob?/a.py": SUM}
    for name, content in answers.items():
        (tmp_path / "answers" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "answers" / name).write_text(content)
    words = ["grade", "answers", "--only", "allreduce,tree", "--csv", "points.csv", "--feedback", "out"]
    assert run(*words, folder=tmp_path).returncode == 1
    with open(tmp_path / "points.csv", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    assert [(row["student"], row["points"]) for row in rows] == [
        ("ada", "1"),
        ("bob", "0"),
        ("bob-3", "1"),
        ("bob?", "1"),
    ]
    assert {"allreduce", "tree"} <= rows[0].keys() and "split" not in rows[0]
    texts = sorted(path.read_text() for path in (tmp_path / "out").iterdir())
    assert len(texts) == 4 and sum("no-broadcast" in text for text in texts) == 1
    assert run("grade", "answers", "--only", "trees", folder=tmp_path).returncode == 2


@pytest.mark.slow
def test_answers_that_cannot_be_graded_are_rows_and_one_is_an_error(tmp_path):
    for name, content in (("a.py", SUM), ("b.py", SPLIT)):
        (tmp_path / name).write_text(content)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/mxnet.py").write_text("raise ImportError('broken')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "broken")}
    both, one = (
        runs.gluon_mgpu("exercise", "grade", *words, cwd=tmp_path, env=env) for words in (["a.py", "b.py"], ["a.py"])
    )
    assert (both.returncode, both.stderr) == (1, "") and both.stdout.count("ImportError: broken") == 2
    assert (one.returncode, one.stdout, one.stderr.count("\n")) == (1, "", 1) and "ImportError: broken" in one.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["a.py", "missing.py"],
        ["a.py", "a.ipynb", "--solution"],
        ["--csv", "a.py", "a.ipynb"],  # must not overwrite an answer
        ["a.py", "--csv", "missing/results.csv"],
        ["--csv", "results.csv"],
    ],
)
def test_a_wrong_command_for_a_class_is_refused_before_any_check(tmp_path, words, capfd, monkeypatch):
    for name, content in (("a.py", SUM), ("a.ipynb", notebook(SUM))):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    runs.error(capfd, command, "grade", *words)
    assert (tmp_path / "a.py").read_text() == SUM and not (tmp_path / "results.csv").exists()


@pytest.mark.slow
def test_the_list_says_what_is_solved_in_this_folder(tmp_path):
    for name, content in (("a.py", SUM), ("b.ipynb", notebook(SPLIT)), ("c.py", exercises.skeleton("step"))):
        (tmp_path / name).write_text(content)

    def states():
        return dict(re.findall(r"^ *\d+ +(\w+) +(solved|started)\b", run("list", folder=tmp_path).stdout, re.MULTILINE))

    assert states() == {"split": "started", "allreduce": "started", "step": "started"}
    run("grade", "a.py", folder=tmp_path)
    assert states() == {"split": "started", "allreduce": "solved", "step": "started"}
    (tmp_path / "a.py").write_text(NO_COPY)  # another answer than the one that was checked
    run("grade", "a.py", folder=tmp_path)
    assert states()["allreduce"] == "started"
