"""Exercises that are graded automatically. An answer begins with the exercise's docstring, and defines the last
function of our solution, which is in `solutions`. `cases` has the hidden cases of each exercise. On each of them,
`diagnosis` compares an answer with our solution and with the known mistakes, which known.txt has as edits of
the solution. mistakes.ini explains the mistakes, and hints.txt what to do about errors. `answers` finds the answers.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

# {lesson page: its exercises}, in the order of the course
ON_PAGE = {
    "from-scratch": ("split", "allreduce", "step", "predict", "accumulate"),
    "gluon": ("replicas", "stats"),
    "pytorch": ("process",),
    "asynchrony": ("timing", "overlap"),
    "rings": ("tree", "ring", "reduce_scatter", "buckets"),
    "zero": ("zero1",),
    "partition": ("block",),
    "hybrid": ("hybrid",),
}
PAGES = {name: page for page, names in ON_PAGE.items() for name in names}
NAMES = tuple(PAGES)


class Mistake(Exception):
    """A mistake in an answer. name: its entry in mistakes.ini. case: the input, and the expected and actual values."""

    def __init__(self, name: str, case: str) -> None:
        super().__init__(f"{name}: {case}")
        self.name, self.case = name, case


def solution(name: str) -> str:
    """The code of our solution."""
    return (Path(__file__).parent / "solutions" / f"{name}.py").read_text()


@cache
def known(name: str) -> list[tuple[str, str]]:
    """The known mistakes: pairs of a name in mistakes.ini and an answer's code. Each is an edit of our solution and, if
    it fits, of each correct answer in known.txt."""
    text = (Path(__file__).parent / "known.txt").read_text()
    found = re.findall(rf"^## {name}: (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    wrong = [(mistake, code) for mistake, code in found if mistake != "correct"]
    edits = [(mistake, code) for mistake, code in wrong if code.startswith("< ")]  # the others are whole functions
    answers = [(mistake, edited(solution(name), code)) for mistake, code in wrong]
    for base in (edited(solution(name), code) for mistake, code in found if mistake == "correct"):
        answers += [(mistake, edited(base, code)) for mistake, code in edits]
    return [(mistake, code) for mistake, code in answers if code]


def edited(code: str, change: str) -> str:
    """Apply a change to an answer: pairs of lines "< OLD" and "> NEW", or code that replaces its function. Returns ""
    if a line to replace does not occur."""
    edits = re.findall(r"((?:^< .*\n)+)((?:^>.*\n)+)", change, re.MULTILINE)
    if not edits:
        return f"{code}\n{change}"
    for old, new in edits:
        old, new = (re.sub(r"^[<>] ?", "", lines, flags=re.MULTILINE)[:-1] for lines in (old, new))
        if old not in code:
            return ""
        code = code.replace(old, new, 1)
    return code


def title(name: str) -> str:
    """The title of an exercise: its task in one line."""
    text = solution(name)[len(f'"""Exercise {name}: ') :].splitlines()[0].rstrip(".")
    return text[0].upper() + text[1:]


@cache
def answer_of(name: str) -> ast.FunctionDef:
    """The function that a learner has to write: the solution's last function."""
    functions = [node for node in ast.parse(solution(name)).body if isinstance(node, ast.FunctionDef)]
    return functions[-1]


def skeleton(name: str) -> str:
    """The solution, without the code of its last function."""
    docstring = answer_of(name).body[0]
    kept = solution(name).splitlines()[: docstring.end_lineno]
    return "\n".join([*kept, '    raise NotImplementedError("write this function")', ""])
