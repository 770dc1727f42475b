"""Runs functions in processes that are forks of this one. They end with it, and write no files."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import site
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from gluon_mgpu.support.subprocesses import how_it_ended

Send = Callable[[Any], None]  # sends the results of a stage, and waits until all processes have sent theirs
FORK = multiprocessing.get_context("fork")
LIBRARIES = tuple({sysconfig.get_path("stdlib"), *site.getsitepackages(), str(Path(__file__).parent), "<frozen"})
FUTEX = ("202", "98", "422", "240")  # system calls with which a thread waits for others: x86-64, aarch64
BLOCKED_SECONDS = 10  # a process that waits for one that has completed its step; a sum takes milliseconds
HINTS = {  # {part of PyTorch's message: what to do}
    "Expected to have finished reduction": "a parameter gets no gradient; use it, or pass find_unused_parameters=True",
    "process group twice": 'the file starts when it is imported; put this under `if __name__ == "__main__"`',
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
        self.log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # what the process prints
        self.connection, end = FORK.Pipe()
        self.failure, self.blocked_since = "", 0.0
        self.process = FORK.Process(target=_run, args=(function, end, self.log))
        self.process.start()
        end.close()

    def read(self) -> Any:
        """The next message; None if the process has completed all stages, failed or ended."""
        try:
            message, self.failure = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            aborted = " (as gloo does if the shapes of a sum differ)" * (self.process.exitcode == -signal.SIGABRT)
            message, self.failure = None, f"the process {how_it_ended(self.process.exitcode)}{aborted}"
        return message

    def waits(self) -> bool:
        """Whether the main thread waits for something that another thread or process does."""
        pid = self.process.pid
        with suppress(OSError):
            return Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()[0] in FUTEX
        return False

    def line(self) -> str:
        """The line of the user's code that the process is in."""
        assert self.process.pid
        self.log.seek(0, os.SEEK_END)
        begin = self.log.tell()
        os.kill(self.process.pid, signal.SIGUSR1)
        for _ in range(100):
            time.sleep(0.02)
            self.log.seek(begin)
            frames = re.findall(r'File "(.+)", line (\d+) in', self.log.read())
            if frames:
                return next((f"line {line}" for file, line in frames if is_users(file)), "a library")
        return "an unknown line"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.log.close()


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
        for rank in [] if first_failure else [*pending]:
            child = children[rank]
            child.blocked_since = (child.blocked_since or now) if messages and child.waits() else 0.0
            if child.blocked_since and now > child.blocked_since + BLOCKED_SECONDS:
                outcome.failure = (
                    f"process {rank} waits forever in {child.line()}; process {min(messages)} has completed the step; "
                    "all processes must make the same calls in the same order"
                )
                return []
            if now > begun + seconds:
                outcome.late = True
                outcome.failure = f"{child.line()} takes more than {seconds:g} s; allow more (--seconds)"
                return []
    failed = {rank: child.failure for rank, child in enumerate(children) if child.failure}
    if failed:
        # if one fails, the others lose their connection
        rank = min(failed, key=lambda rank: "by peer" in failed[rank])
        outcome.failure = f"{f'process {rank}: ' if len(children) > 1 else ''}{failed[rank]}"
        return []
    return [messages[rank] for rank in sorted(messages)]


def _run(function: Callable[[Send], None], end: Connection, log: IO[str]) -> None:
    """What each process does. It sends (result, why it failed)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, however it ends
    if os.getppid() == 1 != os.getpid():
        os._exit(1)  # it has ended
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=False)

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
    message = (str(error).strip().splitlines() or [""])[0][:160]
    hint = next((f" ({hint})" for part, hint in HINTS.items() if part in str(error)), "")
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {message}{hint}"


def load(file: str) -> ModuleType:
    """Execute the user's file."""
    spec = spec_from_file_location("step", file)
    assert spec and spec.loader
    module = sys.modules["step"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
