"""Runs functions in processes that are forks of this one. They end with it, and write no files."""

from __future__ import annotations

import ctypes
import faulthandler
import io
import os
import re
import select
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
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np

from gluon_mgpu.support.subprocesses import how_it_ended

Message = dict[str, np.ndarray]
Send = Callable[[Message], None]  # sends the results of a stage, and waits until all processes have sent theirs
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

    stages: list[list[Message]] = field(default_factory=list)
    failure: str = ""
    late: bool = False


class _Child:
    """A process that runs function(send)."""

    def __init__(self, function: Callable[[Send], None]) -> None:
        self.log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # what the process prints
        self.out, out = os.pipe()
        go, self.go = os.pipe()
        self.done, self.failure, self.blocked = False, "", 0.0
        sys.stdout.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            with suppress(BaseException):
                _begin(self.log, parent)
                _run(function, out, go)
            os._exit(0)
        os.close(out)
        os.close(go)

    def read(self) -> Message | None:
        """The next message; None if the process has ended or failed."""
        head = _read(self.out, 8)
        message = dict(np.load(io.BytesIO(_read(self.out, int.from_bytes(head, "big"))))) if head else {}
        if "failure" in message:
            self.failure = str(message["failure"])
        elif not head:
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self.pid = 0
            aborted = " (as gloo does if the shapes of a sum differ)" if status == -signal.SIGABRT else ""
            self.failure = f"the process {how_it_ended(status)}{aborted}"
        return None if self.failure else message

    def waits(self) -> bool:
        """Whether the main thread waits for something that another thread or process does."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/task/{self.pid}/syscall").read_text().split()[0] in FUTEX
        return False

    def line(self) -> str:
        """The line of the user's code that the process is in."""
        with suppress(OSError):
            self.log.seek(0, os.SEEK_END)
            begin = self.log.tell()
            os.kill(self.pid, signal.SIGUSR1)
            for _ in range(100):
                time.sleep(0.02)
                self.log.seek(begin)
                frames = re.findall(r'File "(.+)", line (\d+) in', self.log.read())
                if frames:
                    time.sleep(0.05)
                    return next((f"line {line}" for file, line in frames if is_users(file)), "a library")
        return "an unknown line"

    def end(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.out)
        os.close(self.go)
        self.log.close()


def run(functions: Sequence[Callable[[Send], None]], seconds: float) -> Outcome:
    """Run each function in a process of its own. seconds: the limit of a stage."""
    children, outcome = [_Child(function) for function in functions], Outcome()
    try:
        while (messages := _stage(children, outcome, seconds)) and "done" not in messages[0]:
            outcome.stages.append(messages)
            for child in children:
                with suppress(BrokenPipeError):
                    os.write(child.go, b".")
    finally:
        for child in children:
            child.end()
    return outcome


def _stage(children: Sequence[_Child], outcome: Outcome, seconds: float) -> list[Message] | None:
    """The next message of each process; None if there is none from each. `outcome` gets the reason."""
    messages: dict[int, Message] = {}
    pending, begun, first_failure = {*range(len(children))}, time.monotonic(), 0.0
    while pending:
        ready, _, _ = select.select([children[rank].out for rank in pending], [], [], 0.1)
        now = time.monotonic()
        for rank in [rank for rank in pending if children[rank].out in ready]:
            message = children[rank].read()
            pending.discard(rank)
            if message is None:
                first_failure = first_failure or now
            else:
                messages[rank] = message
        if first_failure and now > first_failure + 2:  # the others may be about to fail, too
            break
        for rank in [] if first_failure else [*pending]:
            child = children[rank]
            child.blocked = (child.blocked or now) if messages and child.waits() else 0.0
            if child.blocked and now > child.blocked + BLOCKED_SECONDS:
                outcome.failure = (
                    f"process {rank} waits forever in {child.line()}; process {min(messages)} has completed the step; "
                    "all processes must make the same calls in the same order"
                )
                return None
            if now > begun + seconds:
                outcome.late, line = True, child.line()
                outcome.failure = f"{line} takes more than {seconds:g} s; allow more (--seconds)"
                return None
    failed = {rank: child.failure for rank, child in enumerate(children) if child.failure}
    if failed:
        # if one fails, the others lose their connection
        rank = min(failed, key=lambda rank: "by peer" in failed[rank])
        outcome.failure = f"{f'process {rank}: ' if len(children) > 1 else ''}{failed[rank]}"
        return None
    return [messages[rank] for rank in range(len(children))]


def _begin(log: IO[str], parent: int) -> None:
    """What each fork does first."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent, however it ends
    if os.getppid() != parent:
        os._exit(1)
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=False)


def _run(function: Callable[[Send], None], out: int, go: int) -> None:
    def write(message: Any) -> None:
        data = io.BytesIO()
        np.savez(data, **message)
        with open(out, "wb", closefd=False) as stream:
            stream.write(len(data.getvalue()).to_bytes(8, "big") + data.getvalue())

    def send(message: Message) -> None:
        write(message)
        if not os.read(go, 1):
            os._exit(1)

    try:
        function(send)
        write({"done": np.zeros(0)})
    except BaseException as error:
        write({"failure": np.array(where(error))})


def _read(stream: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (part := os.read(stream, size - len(data))):
        data += part
    return data


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
