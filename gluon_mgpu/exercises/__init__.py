"""Exercises with automatic checks. `solutions` contains the tasks and our answers, and `checks` contains the hidden
cases.

A learner's file begins with the exercise's docstring, which names the exercise. A check calls the function in that file
that has the same name as the solution's last function. The check recognizes known mistakes by what the function
computes, not by reading the code.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from gluon_mgpu.runtime import files
from gluon_mgpu.runtime.errors import UsageError, command

# {lesson page: its exercises}, in the order of the course
LESSONS = {
    "from-scratch": ("split", "allreduce", "step", "predict", "accumulate"),
    "gluon": ("replicas", "stats", "seeds"),
    "second-device": ("speedup",),
    "pytorch": ("process",),
    "asynchrony": ("timing", "overlap"),
    "batch-size": ("rate",),
    "rings": ("tree", "ring", "reduce_scatter", "all_gather", "buckets"),
    "zero": ("zero1",),
    "partition": ("block",),
}
PAGES = {name: page for page, names in LESSONS.items() for name in names}
NAMES = tuple(PAGES)


class Mistake(Exception):
    """A mistake in an answer. name: its entry in mistakes.ini. case: the input, and the expected and actual values."""

    def __init__(self, name: str, case: str) -> None:
        super().__init__(f"{name}: {case}")
        self.name, self.case = name, case


def solution(name: str) -> str:
    """The code of our solution."""
    return (Path(__file__).parent / "solutions" / f"{name}.py").read_text()


def title(name: str) -> str:
    """The title of an exercise: its task in one line."""
    text = solution(name)[len(f'"""Exercise {name}: ') :].splitlines()[0].rstrip(".")
    return text[0].upper() + text[1:]


def answer_of(name: str) -> ast.FunctionDef:
    """The function that a learner has to write: the solution's last function."""
    functions = [node for node in ast.parse(solution(name)).body if isinstance(node, ast.FunctionDef)]
    return functions[-1]


def skeleton(name: str) -> str:
    """The solution, without the code of its last function."""
    docstring = answer_of(name).body[0]
    kept = solution(name).splitlines()[: docstring.end_lineno]
    return "\n".join([*kept, '    raise NotImplementedError("write this function")', ""])


def name_of(path: str) -> str:
    """The name of the exercise that a learner's file solves. Raises UsageError if the file is unreadable or does not
    name an exercise."""
    try:
        found = re.match(r'(?:\s|#.*\n)*"""Exercise (\w+):', files.read(path).decode("utf-8-sig"))
    except OSError as error:
        raise UsageError(None, path, f"cannot be read ({error.strerror})") from None
    except ValueError:
        raise UsageError(None, path, "not a text file") from None
    if not found or found[1] not in NAMES:
        problem = f"{found[1]} is not an exercise" if found else "does not name an exercise"
        first = f'the file must begin with """Exercise NAME:, as written by `{command("exercise start")}`'
        raise UsageError(None, path, f"{problem}; {first}")
    return found[1]
