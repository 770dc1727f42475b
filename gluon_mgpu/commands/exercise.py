"""`gluon-mgpu exercise`: exercises on data parallelism that are graded automatically."""

from __future__ import annotations

import csv
import io
import itertools
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import click

from gluon_mgpu import exercises
from gluon_mgpu.commands import common
from gluon_mgpu.exercises import Mistake, grading
from gluon_mgpu.exercises.answers import SUFFIXES, Answer, find, in_file
from gluon_mgpu.support import files, log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError, command, setting
from gluon_mgpu.support.params import FILE, FOLDER, FloatRange

Graded = list[tuple[Answer, "Mistake | None"]]
WITHOUT = "without an answer"  # files


class Exercises(click.ParamType):
    """Names of exercises, separated by commas."""

    name = "exercises"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = value if isinstance(value, tuple) else tuple(name.strip() for name in value.split(","))
        for name in names:
            if name not in exercises.NAMES:
                self.fail(f"{name!r} is not an exercise; `{command('exercise list')}` shows them", param, ctx)
        return names


@click.group(
    cls=common.CommandGroup,
    examples="""
        gluon-mgpu exercise list
        gluon-mgpu exercise start allreduce
        gluon-mgpu exercise grade allreduce.py
    """,
)
def exercise() -> None:
    """Solve exercises. Start one, complete the function in its file, and have it graded."""


@exercise.command("list", examples="gluon-mgpu exercise list")
def list_() -> None:
    """List the exercises, each with its page, and show which are started or solved in this folder."""
    here = [answer for path in sorted(os.listdir()) if path.endswith(SUFFIXES) for answer in in_file(path)]
    progress = dict.fromkeys((answer.name for answer in here), "started")
    progress |= {answer.name: "solved" for answer in here if answer.is_solved}
    rows = [
        (f"{number:2}", name, progress.get(name, ""), exercises.title(name), f"docs/{page}.md")
        for number, (name, page) in enumerate(exercises.PAGES.items(), 1)
    ]
    click.echo("\n".join(log.table(rows, "<")))


@exercise.command(examples="gluon-mgpu exercise start allreduce --out answers/allreduce.py")
@click.argument("name", type=click.Choice(exercises.NAMES), metavar="NAME")
@common.option("--out", type=FILE, metavar="FILE", help="The file to write. Default: NAME.py.")
def start(name: str, out: str | None) -> None:
    """Start an exercise: write a file with the task and a function to complete. An existing file is left unchanged."""
    path = out or f"{name}.py"
    if os.path.lexists(path):
        advice = f"already exists; complete it, or choose another file with {setting('out')}"
        raise UsageError("out" if out else None, path, advice)
    files.write_whole(path, lambda file: file.write(exercises.skeleton(name).encode()))
    click.echo(f"wrote {path}: complete the function, then run `{command(f'exercise grade {shlex.quote(str(path))}')}`")


@exercise.command(
    examples="""
        gluon-mgpu exercise grade allreduce.py --solution
        gluon-mgpu exercise grade answers --csv results.csv --feedback feedback --only predict,accumulate
    """
)
@click.argument("paths", nargs=-1, required=True, type=FILE, metavar="FILE|FOLDER...")
@common.option("--solution", is_flag=True, help="Also show a solution. Only for a single answer.")
@common.option("--csv", "csv_file", type=FILE, metavar="FILE.csv", help="Write a table of students by exercises.")
@common.option("--feedback", type=FOLDER, metavar="FOLDER", help="Write a text file per student, with each diagnosis.")
@common.option("--only", type=Exercises(), metavar="NAME,...", help="Grade only these exercises.")
@common.option(
    "--seconds",
    type=FloatRange(0, min_open=True),
    default=grading.SECONDS,
    help="Time limit for each answer.",
)
@common.option("--jobs", type=click.IntRange(1), default=1, help="Answers to grade at the same time.")
@click.pass_context
def grade(
    context: click.Context,
    paths: tuple[str, ...],
    solution: bool,
    csv_file: str | None,
    feedback: str | None,
    only: tuple[str, ...] | None,
    seconds: float,
    jobs: int,
) -> None:
    """Grade answers: Python files, notebooks with a cell for each answer, and folders with such files. Each answer runs
    on hidden cases in a new process, with at most 4 GB of memory. A single answer's mistake is explained. For several
    answers, a table names their mistakes; for folders of students, another one shows who has solved what: one point
    per exercise. The files of --csv and --feedback are rewritten after each answer. Exit status: 0 if each file or
    student has only correct answers, else 1."""
    names = only or exercises.NAMES
    answers = [answer for answer in find(paths) if not answer.name or answer.name in names]
    if not answers:
        raise UsageError("only", ",".join(names), "no answers to these exercises")
    if csv_file:
        _check_writable(csv_file)
    if feedback:
        try:
            os.makedirs(feedback, exist_ok=True)
        except OSError as error:
            raise files.cannot_write(feedback, error) from None
    if len(answers) > 1 and solution:
        raise UsageError("solution", True, f"needs a single answer, not {len(answers)}")
    graded: Graded = []
    problem = None
    for mistake in _each(answers, seconds, jobs) if len(answers) > 1 else [_single(answers[0], solution, seconds)]:
        graded.append((answers[len(graded)], mistake))
        problem = _write(csv_file, _csv(graded, names)) if csv_file else None
        if feedback:
            problem = _write_feedback(feedback, graded) or problem
    correct = [mistake for _, mistake in graded].count(None)
    if len(answers) > 1:
        found = sum(bool(answer.name) for answer in answers)
        without = f"; {len(answers) - found} {WITHOUT}" if found < len(answers) else ""
        click.echo("\n".join([f"{correct} of {found} correct{without}", *_by_student(graded, names)]))
    if problem:
        raise problem
    if csv_file:
        click.echo(f"wrote {csv_file}")
    if feedback:
        click.echo(f"wrote {feedback}: {len(_students(graded))} {log.plural(len(_students(graded)), 'file')}")
    context.exit(0 if correct == len(answers) else 1)


def _single(answer: Answer, solution: bool, seconds: float) -> Mistake | None:
    if answer.problem:
        raise UsageError(None, answer.label, answer.problem)
    mistake = grading.grade(answer, seconds)
    if mistake and mistake.name == "not-graded":
        raise Error(mistake.case)
    click.echo(grading.report(answer.label, answer.name, mistake))
    following = exercises.NAMES[exercises.NAMES.index(answer.name) + 1 :]
    if following and not mistake:
        click.echo(f"next: `{command(f'exercise start {following[0]}')}`")
    if solution:
        click.echo(f"\n{exercises.solution(answer.name)}", nl=False)
    return mistake


def _each(answers: Sequence[Answer], seconds: float, jobs: int) -> Iterator[Mistake | None]:
    """Grade several answers. Prints each row of a table as soon as it is known."""
    header = ("file", "exercise", "result")
    rows = [(log.printable(answer.label), answer.name or "-", header[-1]) for answer in answers]
    first, *lines = log.table([header, *rows], "<")
    click.echo(first)
    pool = ThreadPoolExecutor(jobs)
    try:
        mistakes = pool.map(partial(grading.grade, seconds=seconds, show=lambda *_, **__: None), answers)
        for line, answer, mistake in zip(lines, answers, mistakes):
            click.echo(line.removesuffix(header[-1]) + _result(answer, mistake))
            yield mistake
    finally:  # after Ctrl-C, too
        pool.shutdown(wait=False, cancel_futures=True)
        subprocesses.kill_running()


def _result(answer: Answer, mistake: Mistake | None) -> str:
    if mistake and mistake.name == "not-graded":
        return f"not graded: {log.printable(mistake.case)}"
    return (answer.problem.partition(";")[0] or mistake.name) if mistake else "correct"


def _write(path: str, content: bytes) -> Error | None:
    """Write what is known of the answers that are graded so far. An error does not stop the grading: it may be gone
    after the next answer."""
    try:
        files.write_whole(path, lambda file: file.write(content))
    except Error as error:
        return error
    return None


def _write_feedback(folder: str, graded: Graded) -> Error | None:
    """Write the file of the student whose answer was graded last, with the diagnoses of all answers so far."""
    names: dict[str, str] = {}  # {student: file}
    for student in (_student(answer) for answer, _ in graded):
        name = re.sub(r"[^\w.-]+", "_", student).strip("._") or "student"
        free = (f"{name}-{n}" if n else name for n in itertools.count())
        names.setdefault(student, next(name for name in free if name not in names.values()))
    last = _student(graded[-1][0])
    reports = [
        f"{log.printable(answer.label)}: {log.printable(answer.problem or mistake.case)}"
        if mistake and mistake.name in ("no-answer", "not-graded")
        else grading.report(answer.label, answer.name, mistake)
        for answer, mistake in graded
        if _student(answer) == last
    ]
    return _write(os.path.join(folder, f"{names[last]}.txt"), "\n\n".join([*reports, ""]).encode())


def _student(answer: Answer) -> str:
    """The student of an answer; without one, each file is one."""
    return log.printable(answer.student or answer.path)


def _students(graded: Graded) -> dict[str, dict[str, str]]:
    """{student: {exercise: result}}; without a student's folder, each file is one. Of several answers to an exercise,
    the correct one counts, or the last. WITHOUT has the files that contain none."""
    students: dict[str, dict[str, str]] = {}
    for answer, mistake in graded:
        results = students.setdefault(_student(answer), {})
        if not answer.name:
            results[WITHOUT] = "; ".join(filter(None, [results.get(WITHOUT), log.printable(answer.label)]))
        elif results.get(answer.name) != "correct":
            results[answer.name] = _result(answer, mistake)
    return students


def _by_student(graded: Graded, names: Sequence[str]) -> list[str]:
    if not any(answer.student for answer, _ in graded):
        return []
    students = _students(graded)
    names = [name for name in names if any(name in results for results in students.values())]
    marks = {
        student: [{"correct": "yes", "": ""}.get(results.get(name, ""), "no") for name in names]
        for student, results in students.items()
    }
    rows = [(student, *of_student, str(of_student.count("yes"))) for student, of_student in marks.items()]
    totals = ("solved", *(str(of_exercise.count("yes")) for of_exercise in zip(*marks.values())), "")
    return ["", *log.table([("student", *names, "points"), *rows, totals], "<")]


def _csv(graded: Graded, names: Sequence[str] = exercises.NAMES) -> bytes:
    file = io.StringIO()
    rows = csv.DictWriter(file, ("student", "points", *names, WITHOUT), lineterminator="\n")
    rows.writeheader()
    for student, results in _students(graded).items():
        row = {"student": student, "points": str([*results.values()].count("correct")), **results}
        rows.writerow({column: _no_formula(cell) for column, cell in row.items()})
    return file.getvalue().encode("utf-8-sig")  # without this mark, Excel does not expect UTF-8


def _no_formula(cell: str) -> str:
    """A cell that a spreadsheet shows as it is, and does not compute."""
    return f"'{cell}" if cell.lstrip()[:1] in tuple("=+-@") else cell


def _check_writable(path: str) -> None:
    """Raise UsageError now, not after minutes, if the file cannot be written, or is no .csv file, such as an answer."""
    folder = os.path.dirname(path) or "."
    if not path.endswith(".csv"):
        raise UsageError("csv_file", path, "must end with .csv")
    if not os.access(folder, os.W_OK):
        raise UsageError("csv_file", path, f"cannot write to the folder {folder}; choose another one")
