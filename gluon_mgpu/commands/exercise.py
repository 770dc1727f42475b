"""`gluon-mgpu exercise`: exercises on data parallelism with automatic checks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import click

from gluon_mgpu import exercises
from gluon_mgpu.commands import common
from gluon_mgpu.exercises import Answer, Mistake
from gluon_mgpu.exercises import check as checker
from gluon_mgpu.runtime import files, log
from gluon_mgpu.runtime.errors import UsageError, command


@click.group(
    cls=common.Group,
    examples="""
        gluon-mgpu exercise list
        gluon-mgpu exercise start allreduce
        gluon-mgpu exercise check allreduce.py
    """,
)
def exercise() -> None:
    """Solve exercises with automatic checks. Start an exercise, complete the function in its file, and check it."""


@exercise.command("list", examples="gluon-mgpu exercise list")
def list_() -> None:
    """List the exercises, their lesson pages, and which of them this folder's files have solved or started."""
    here = [
        answer
        for path in sorted(os.listdir())
        if path.endswith(exercises.SUFFIXES)
        for answer in exercises.answers(path)
    ]
    state = dict.fromkeys((answer.name for answer in here), "started")
    state |= {answer.name: "solved" for answer in here if answer.is_solved}
    rows = [
        (f"{number:2}", name, state.get(name, ""), exercises.title(name), f"docs/{page}.md")
        for number, (name, page) in enumerate(exercises.PAGES.items(), 1)
    ]
    click.echo("\n".join(log.table(rows, "<")))


@exercise.command(examples="gluon-mgpu exercise start allreduce --out answers/allreduce.py")
@click.argument("name", type=click.Choice(exercises.NAMES), metavar="NAME")
@common.option("--out", type=common.FILE, metavar="FILE", help="The file to write. Default: NAME.py.")
def start(name: str, out: str | None) -> None:
    """Start an exercise: write a file with the task and a function to complete. An existing file is left unchanged."""
    path = out or f"{name}.py"
    if os.path.lexists(path):
        raise UsageError("out", path, "this file already exists; choose another one")
    files.write_whole(path, lambda file: file.write(exercises.skeleton(name).encode()))
    click.echo(f"wrote {path}: complete the function, then run `{command(f'exercise check {path}')}`")


@exercise.command(
    examples="""
        gluon-mgpu exercise check allreduce.py --solution
        gluon-mgpu exercise check answers --json results.json
    """
)
@click.argument("paths", nargs=-1, required=True, type=common.FILE, metavar="FILE|FOLDER...")
@common.option("--solution", is_flag=True, help="Also show a solution. Only for a single answer.")
@common.option(
    "--json", "json_file", type=common.FILE, metavar="FILE.json", help="Also write the results to this file."
)
@click.pass_context
def check(context: click.Context, paths: tuple[str, ...], solution: bool, json_file: str | None) -> None:
    """Check answers: Python files, notebooks with a cell for each answer, and folders with such files. Each answer runs
    on hidden cases in a new process. For a single answer, the mistake is explained; for several, a table names the
    mistakes. The exit status is 0 if all answers are correct, and 1 otherwise."""
    answers = exercises.find(paths)
    _check_writable(json_file)
    if len(answers) > 1 and solution:
        raise UsageError("solution", True, f"needs a single answer, not {len(answers)}")
    mistakes = _each(answers) if len(answers) > 1 else [_single(answers[0], solution)]
    if json_file:
        results = [_result(answer, mistake) for answer, mistake in zip(answers, mistakes)]
        files.write_whole(json_file, lambda file: file.write(f"{json.dumps(results, indent=2)}\n".encode()))
        click.echo(f"wrote {json_file}")
    context.exit(1 if any(mistakes) else 0)


def _single(answer: Answer, solution: bool) -> Mistake | None:
    if answer.problem:
        raise UsageError(None, answer.label, answer.problem)
    mistake = checker.run(answer)
    click.echo(checker.report(answer.label, answer.name, mistake))
    following = exercises.NAMES[exercises.NAMES.index(answer.name) + 1 :]
    if following and not mistake:
        click.echo(f"next: `{command(f'exercise start {following[0]}')}`")
    if solution:
        click.echo(f"\n{exercises.solution(answer.name)}", nl=False)
    return mistake


def _each(answers: Sequence[Answer]) -> list[Mistake | None]:
    """Check several answers. Prints each row of a table as soon as it is known."""
    header = ("file", "exercise", "result")
    rows = [(log.printable(answer.label), answer.name or "-", header[-1]) for answer in answers]
    first, *lines = log.table([header, *rows], "<")
    click.echo(first)
    mistakes = []
    for line, answer in zip(lines, answers):
        mistake = checker.run(answer, show=lambda *_, **__: None)
        result = (answer.problem.partition(";")[0] or mistake.name) if mistake else "correct"
        click.echo(line.removesuffix(header[-1]) + result)
        mistakes.append(mistake)
    click.echo(f"{mistakes.count(None)} of {len(answers)} correct")
    return mistakes


def _result(answer: Answer, mistake: Mistake | None) -> dict[str, object]:
    report = answer.problem or checker.report(answer.label, answer.name, mistake)
    found = {"exercise": answer.name or None, "correct": not mistake, "mistake": mistake and mistake.name}
    return {"file": answer.path, "cell": answer.cell, **found, "report": report}


def _check_writable(json_file: str | None) -> None:
    """Raise UsageError now, not after minutes, if the file cannot be written, or is one of the answers."""
    if json_file is None:
        return
    folder = os.path.dirname(json_file) or "."
    if not json_file.endswith(".json"):
        raise UsageError("json_file", json_file, "must end with .json")
    if not os.access(folder, os.W_OK):
        raise UsageError("json_file", json_file, f"cannot write to the folder {folder}; choose another one")
