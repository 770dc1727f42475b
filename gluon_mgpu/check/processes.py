"""Runs functions in processes that are forks of this one. They end with it, and write no files."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import site
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from gluon_mgpu.support.subprocesses import how_it_ended

Send = Callable[[Any], None]  # sends the results of a stage, and waits until all processes have sent theirs
FORK = multiprocessing.get_context("fork")
LIBRARIES = tuple({sysconfig.get_path("stdlib"), *site.getsitepackages(), str(Path(__file__).parent), "<frozen"})
TIMED_OUT = "Timed out"
HINTS = {  # {part of PyTorch's message: what to do}
    "Expected to have finished reduction": "a parameter gets no gradient; use it, or pass find_unused_parameters=True",
    "process group twice": 'the file starts when it is imported; put this under `if __name__ == "__main__"`',
    TIMED_OUT: "waits for a process that does not make the same call; all must make the same calls in the same order",
    "by peer": "the processes do not make the same calls in the same order",
    "op.preamble": "the processes do not make the same calls in the same order, with the same shapes",
}


@dataclass
class Outcome:
    """stages: what each process sent, stage by stage. failure: why the processes ended before all stages were complete;
    empty if they did not. late: whether this was because of the time limit."""

    stages: list[list[Any]] = field(default_factory=list)
    failure: str = ""
    late: bool = False


class _Child:
    """A process that runs function(send)."""

    def __init__(self, function: Callable[[Send], None]) -> None:
        self.connection, end = FORK.Pipe()
        self.failure = ""
        self.process = FORK.Process(target=_run, args=(function, end, os.getpid()))
        self.process.start()
        end.close()

    def read(self) -> Any:
        """The next message; None if the process has completed all stages, failed or ended."""
        try:
            message, self.failure = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            status = self.process.exitcode or 0
            aborted = " (as gloo does if the shapes of a sum differ)" * (status == -signal.SIGABRT)
            message, self.failure = None, f"the process {how_it_ended(status)}{aborted}"
        return message

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run(functions: Sequence[Callable[[Send], None]], seconds: float) -> Outcome:
    """Run each function in a process of its own. seconds: the limit of a stage."""
    children, outcome = [_Child(function) for function in functions], Outcome()
    try:
        while messages := _stage(children, outcome, seconds):
            outcome.stages.append(messages)
            for child in children:
                with suppress(BrokenPipeError):
                    child.connection.send("continue")
    finally:
        for child in children:
            child.end()
    return outcome


def _stage(children: Sequence[_Child], outcome: Outcome, seconds: float) -> list[Any]:
    """The next message of each process; empty if there is none from each. `outcome` gets the reason."""
    messages: dict[int, Any] = {}
    pending, begun, first_failure = {*range(len(children))}, time.monotonic(), 0.0
    while pending:
        ready = wait([children[rank].connection for rank in pending], 0.1)
        now = time.monotonic()
        for rank in [rank for rank in pending if children[rank].connection in ready]:
            if (found := children[rank].read()) is not None:
                messages[rank] = found
            pending.discard(rank)
            if children[rank].failure:
                first_failure = first_failure or now
        if first_failure and now > first_failure + 2:  # the others may be about to fail, too
            break
        if now > begun + seconds:
            outcome.late, outcome.failure = True, f"a step takes more than {seconds:g} s; allow more (--seconds)"
            return []
    failed = {rank: child.failure for rank, child in enumerate(children) if child.failure}
    if failed:
        # if one fails, the others lose their connection
        rank = min(failed, key=lambda rank: "by peer" in failed[rank])
        outcome.failure = f"{f'process {rank}: ' if len(children) > 1 else ''}{failed[rank]}"
        if TIMED_OUT in outcome.failure and not messages:  # the others may only be slow
            outcome.late, outcome.failure = True, f"{outcome.failure}; allow more (--seconds)"
        return []
    return [messages[rank] for rank in sorted(messages)]


def _run(function: Callable[[Send], None], end: Connection, parent: int) -> None:
    """What each process does. It sends (result, why it failed). parent: the process that started it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, however it ends
    if os.getppid() != parent:  # it has ended
        os._exit(1)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)

    def send(result: Any) -> None:
        end.send((result, ""))
        end.recv()

    try:
        function(send)
        end.send((None, ""))
    except BaseException as error:
        end.send((None, where(error)))
    os._exit(0)


def is_users(file: str) -> bool:
    """Whether a file of a traceback is the user's, not a library's."""
    return not file.startswith(LIBRARIES) and os.path.exists(file)


def where(error: BaseException) -> str:
    """An error in one line, with the line of the user's code."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    message = re.sub(r"^\[.+?\] ", "", (str(error).strip().splitlines() or [""])[0])[:160]  # without gloo's own line
    hint = next((f" ({hint})" for part, hint in HINTS.items() if part in str(error)), "")
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {message}{hint}"


def load(file: str) -> ModuleType:
    """Execute the user's file."""
    spec = spec_from_file_location("step", file)
    assert spec and spec.loader
    module = sys.modules["step"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
