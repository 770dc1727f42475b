"""Which lines and conditions of the user's functions a step has reached, as bytecode tells."""

from __future__ import annotations

import ast
import dis
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from gluon_mgpu.support.programs import is_users

BORING = {"isinstance", "hasattr", "len", "callable", "is_initialized", "get_rank", "get_world_size", "is_available"}


@dataclass
class Reached:
    """What has run of a file. lines: of the functions that have run. ran: those of them that have. jumps: (line,
    offset, whether it jumped) of the conditions that depend on data."""

    lines: set[int] = field(default_factory=set)
    ran: set[int] = field(default_factory=set)
    jumps: set[tuple[int, int, bool]] = field(default_factory=set)


Done = dict[str, Reached]  # by file


@contextmanager
def traced(done: Done) -> Iterator[None]:
    """Note what runs of the user's functions."""

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not code.co_flags & inspect.CO_OPTIMIZED or not is_users(code.co_filename):  # a module, or not the user's
            return None
        here, jumps, last = done.setdefault(code.co_filename, Reached()), _jumps(code), -1
        here.lines |= _lines(code)
        here.ran.add(frame.f_lineno)  # the line of `def`
        frame.f_trace_opcodes = bool(jumps)

        def step(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            nonlocal last
            if event == "line":
                here.ran.add(frame.f_lineno)
            if event == "opcode":
                if last in jumps:
                    line, target = jumps[last]
                    here.jumps.add((line, last, frame.f_lasti == target))
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
    for file, there in found.items():
        here = to.setdefault(file, Reached())
        here.lines |= there.lines
        here.ran |= there.ran
        here.jumps |= there.jumps


def missed(done: Done) -> list[str]:
    """The lines of functions that ran which did not, as in "lines 41 to 43", and conditions that had always the same
    result."""
    found, main = list[str](), next(iter(done), "")
    for file, here in done.items():
        name = Path(file).name if os.path.exists(file) else "another cell"
        where = "" if file == main else f" of {name}"
        for has_run, group in groupby(sorted(here.lines), key=here.ran.__contains__):
            first, *others = group
            if not has_run:
                found.append((f"lines {first} to {others[-1]}" if others else f"line {first}") + where)
        for line in _one_sided(_conditions(file), here):
            found.append(f"the other branch of the condition in line {line}{where}")
    return found


def _one_sided(conditions: Sequence[ast.If | ast.IfExp], here: Reached) -> list[int]:
    """The lines of conditions that had one result, unless lines tell so."""
    found = list[int]()
    for node in conditions:
        results = {jump[1:] for jump in here.jumps if jump[0] in _span(node.test)}
        is_told = any(line in _span(node) for line in here.lines - here.ran)
        if results and len({offset for offset, _ in results}) == len(results) and not is_told:
            found.append(node.lineno)
    return sorted({*found})


@cache
def _lines(code: CodeType) -> set[int]:
    """The lines of a function, without those that raise an error or leave a loop, and messages of assertions."""
    lines, nodes = {line for _, line in dis.findlinestarts(code) if line}, [*ast.walk(_tree(code.co_filename))]
    leaving = [_span(node) for node in nodes if isinstance(node, (ast.Raise, ast.Continue, ast.Break))]
    messages = [_span(node)[1:] for node in nodes if isinstance(node, ast.Assert)]
    return lines.difference(*leaving, *messages)


@cache
def _jumps(code: CodeType) -> dict[int, tuple[int, int]]:
    """The line and the target of each jump of a condition that depends on data, by its offset."""
    lines = {line for node in _conditions(code.co_filename) for line in _span(node.test)}
    found, line, starts = dict[int, tuple[int, int]](), code.co_firstlineno, dict(dis.findlinestarts(code))
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if "_IF_" in instruction.opname and line in lines:
            found[instruction.offset] = line, instruction.argval
    return found


@cache
def _conditions(file: str) -> list[ast.If | ast.IfExp]:
    """The conditions of a file that depend on data."""
    nodes = [node for node in ast.walk(_tree(file)) if isinstance(node, (ast.If, ast.IfExp))]
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


@cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_bytes() if os.path.exists(file) else "".join(linecache.getlines(file)))
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _span(node: ast.expr | ast.stmt) -> range:
    """The lines of a node."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)
