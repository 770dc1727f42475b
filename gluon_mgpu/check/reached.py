"""Which lines and conditions of the user's functions a step has reached, as bytecode tells."""

from __future__ import annotations

import ast
import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gluon_mgpu.support.programs import is_users

Key = tuple[str, int, str]  # file, first line, name
Done = dict[Key, set[Any]]  # lines that ran, and (line, offset, whether it jumped) of conditions
BORING = {"isinstance", "hasattr", "len", "callable", "is_initialized", "get_rank", "get_world_size", "is_available"}


@contextmanager
def traced(done: Done) -> Iterator[None]:
    """Note what runs of the user's functions."""

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not is_users(code.co_filename):
            return None
        here = done.setdefault((code.co_filename, code.co_firstlineno, code.co_name), set())
        conditions, last = _conditions(code), -1
        frame.f_trace_opcodes = bool(conditions)

        def step(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            nonlocal last
            if event == "line":
                here.add(frame.f_lineno)
            if event == "opcode":
                if last in conditions:
                    line, target = conditions[last]
                    here.add((line, last, frame.f_lasti == target))
                last = frame.f_lasti
            return step

        return step

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def add(to: Done, found: Done) -> None:
    """Note what another process has done."""
    for code, here in found.items():
        to.setdefault(code, set()).update(here)


@cache
def _conditions(code: CodeType) -> dict[int, tuple[int, int]]:
    """The line and the target of each conditional jump, if the function has conditions that depend on data."""
    found, line = dict[int, tuple[int, int]](), code.co_firstlineno
    function = _functions(code.co_filename).get((code.co_firstlineno, code.co_name))
    if not function or not _varied(function):
        return found
    starts = dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if "_IF_" in instruction.opname:
            found[instruction.offset] = line, instruction.argval
    return found


def missed(done: Done) -> list[str]:
    """The lines of functions that ran which did not, as in "lines 41 to 43", and conditions that had always the same
    result."""
    found, main = list[str](), next(iter(done), ("",))[0]
    for file in dict.fromkeys(file for file, *_ in done):
        lines, conditions = set[int](), set[int]()
        for (of, first, name), here in done.items():
            function = _functions(file).get((first, name)) if of == file else None
            if function:
                not_run = _lines(function, {x if isinstance(x, int) else x[0] for x in here})
                lines |= not_run
                conditions |= _one_sided(function, [x for x in here if not isinstance(x, int)], not_run)
        where = "" if file == main else f" of {Path(file).name}"
        found += [(f"line {a}" if a == b else f"lines {a} to {b}") + where for a, b in _ranges(sorted(lines))]
        found += [f"the other branch of the condition in line {line}{where}" for line in sorted(conditions)]
    return found


def _lines(function: ast.FunctionDef, ran: set[int]) -> set[int]:
    """The lines of the statements that did not run."""
    found = set[int]()
    for statement in _statements(function.body):
        last = statement.end_lineno or statement.lineno
        if hasattr(statement, "body"):
            last = max(statement.lineno, statement.body[0].lineno - 1)
        span = {*range(statement.lineno, last + 1)}
        found |= set() if ran & span else span
    return found


def _one_sided(function: ast.FunctionDef, jumps: list[Any], not_run: set[int]) -> set[int]:
    """The lines of conditions that depend on data and had one result, unless this left lines out. jumps: see `Done`."""
    found = set[int]()
    for node in _varied(function):
        results = {x[1:] for x in jumps if node.test.lineno <= x[0] <= (node.test.end_lineno or 0)}
        is_whole = isinstance(node, ast.If) and not_run & {*range(node.lineno, (node.end_lineno or 0) + 1)}
        if results and len({offset for offset, _ in results}) == len(results) and not is_whole:
            found.add(node.lineno)
    return found


def _varied(function: ast.FunctionDef) -> list[ast.If | ast.IfExp]:
    """The conditions that depend on data."""
    nodes = [node for node in ast.walk(function) if isinstance(node, (ast.If, ast.IfExp))]
    return [node for node in nodes if _depends_on_data(node.test)]


def _depends_on_data(test: ast.expr) -> bool:
    """Whether a condition may be another one with other data: it compares sizes of numbers, or calls a function."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] not in BORING:
            return True
        if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Lt, ast.Gt, ast.LtE, ast.GtE)) for op in node.ops):
            if "world" not in ast.unparse(node) and "rank" not in ast.unparse(node):
                return True
    return False


def _statements(body: list[ast.stmt]) -> Iterator[Any]:
    """The statements of a function that do something, without those of functions in it."""
    for statement in body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_text or isinstance(statement, (ast.Raise, ast.Pass, ast.Global, ast.Nonlocal, ast.Break, ast.Continue)):
            continue
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            continue
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)


@cache
def _functions(file: str) -> dict[tuple[int, str], ast.FunctionDef]:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {(min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.name): node for node in found}


def _ranges(lines: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of lines that follow each other."""
    for _, pairs in groupby(enumerate(lines), key=lambda pair: pair[1] - pair[0]):
        run = [line for _, line in pairs]
        yield run[0], run[-1]
