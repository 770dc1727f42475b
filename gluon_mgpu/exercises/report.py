"""Checks a learner's file in a new process, with a time limit, and prints the result. Does not import MXNet."""

from __future__ import annotations

import configparser
import sys
import textwrap
from pathlib import Path

from gluon_mgpu.exercises import name_of
from gluon_mgpu.runtime import subprocesses

SECONDS = 60  # time limit; a check takes 2 seconds, and longer on a busy machine
WRONG = 3  # exit status of the new process if it found a mistake
WIDTH = 100


class Mistake(Exception):
    """name: a section of mistakes.ini explains it. case: what was computed, with numbers."""

    def __init__(self, name: str, case: str) -> None:
        super().__init__(f"{name}: {case}")
        self.name, self.case = name, case


def report(path: str, name: str, mistake: Mistake | None) -> str:
    """The result of a check for the learner. path, name: the file and its exercise."""
    if mistake is None:
        return f"{path}: correct"
    texts = configparser.ConfigParser(interpolation=None)
    texts.read(Path(__file__).with_name("mistakes.ini"))
    why = textwrap.fill(texts[name][mistake.name], WIDTH)
    return f"{path}: not correct yet. Mistake: {mistake.name}\n{textwrap.indent(mistake.case, '  ')}\n{why}"


def check_file(path: str, seconds: float = SECONDS) -> bool:
    """Check a file and print the result. Returns whether it is correct.

    What the file prints is passed on. Raises UsageError as `name_of` does, Error if the process crashes.
    """
    name = name_of(path)
    command = [sys.executable, "-u", "-m", "gluon_mgpu.exercises.check", path]
    finished = subprocesses.run(command, seconds=seconds, on_line=lambda line: print(line, end="", flush=True))
    if finished.status is None:
        print(report(path, name, Mistake("time-limit", f"no result after {seconds:g} seconds")))
    elif finished.status != WRONG:
        subprocesses.check(path, finished)
    return finished.status == 0
