"""`gluon-mgpu exercise`: exercises on data parallelism with automatic checks."""

from __future__ import annotations

import os

import click

from gluon_mgpu import exercises
from gluon_mgpu.commands import common
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
    """List the exercises and their lesson pages."""
    pages = enumerate(exercises.PAGES.items(), 1)
    rows = [(f"{number:2}", name, exercises.title(name), f"docs/{page}.md") for number, (name, page) in pages]
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


@exercise.command(examples="gluon-mgpu exercise check allreduce.py --solution")
@click.argument("file", type=common.FILE)
@common.option("--solution", is_flag=True, help="Also show a solution.")
@click.pass_context
def check(context: click.Context, file: str, solution: bool) -> None:
    """Check an answer. FILE runs on hidden cases in a new process. If a case fails, the mistake is named and explained.
    The exit status is 0 if the answer is correct, and 1 otherwise."""
    name, correct = exercises.name_of(file), checker.run(file)
    following = exercises.NAMES[exercises.NAMES.index(name) + 1 :]
    if correct and following:
        click.echo(f"next: `{command(f'exercise start {following[0]}')}`")
    if solution:
        click.echo(f"\n{exercises.solution(name)}", nl=False)
    context.exit(0 if correct else 1)
