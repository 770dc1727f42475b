"""Runs functions in processes that are forks of this one. They end with it, and write no files."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from gluon_mgpu.support.errors import Error
from gluon_mgpu.support.programs import is_users
from gluon_mgpu.support.subprocesses import how_it_ended

Send = Callable[[Any], None]  # sends the results of a stage, and waits until all processes have sent theirs
FORK = multiprocessing.get_context("fork")
WAITS = "waits for a process that does not make the same call; all must make the same calls in the same order"
OTHER_CALLS = "the processes do not make the same calls in the same order, with the same shapes"
HINTS = {  # {part of a message of PyTorch or MXNet: what is wrong, in the user's terms}
    "Expected to have finished reduction": "a parameter gets no gradient; use it, or pass find_unused_parameters=True",
    "process group twice": 'the file starts when it is imported; put this under `if __name__ == "__main__"`',
    "Timed out": WAITS,
    "by peer|op.preamble": OTHER_CALLS,
    "not in a computational graph": (
        "backward finds nothing recorded; compute the loss in autograd.record(), and call attach_grad"
    ),
    r"_update expects \d+ inputs": "a parameter has no gradient (p.grad is None); call attach_grad for each",
    "has not been updated by backward": (
        "trainer.step finds no new gradients; call backward on each device, and step once"
    ),
    r"same context|not initialized on context|ctx\(\) ==": (
        "the network is not on all devices; call initialize once, with the whole list: initialize(ctx=ctx)"
    ),
    "Shape inconsistent": "the shapes of what is computed together do not fit; split the labels like the images",
    "evenly split": "uneven batches are rejected; give some shards one more example (even_split=False)",
}


@dataclass
class Outcome:
    """stages: what each process sent, stage by stage. failure: why the processes ended before all stages were complete;
    empty if they did not. late: whether this was because of the time limit."""

    stages: list[list[Any]] = field(default_factory=list)
    failure: str = ""
    late: bool = False


def run(functions: Sequence[Callable[[Send], None]], seconds: float) -> Outcome:
    """Run each function in a process of its own. seconds: the limit of a stage."""
    children, outcome = list[tuple[Connection, Any]](), Outcome()
    try:
        for function in functions:
            connection, end = FORK.Pipe()
            process = FORK.Process(target=_run, args=(function, end, os.getpid()))
            process.start()
            end.close()
            children.append((connection, process))
        while messages := _stage(children, outcome, seconds):
            outcome.stages.append(messages)
            for connection, _ in children:
                with suppress(BrokenPipeError):
                    connection.send("continue")
    finally:
        for connection, process in children:
            process.kill()
            process.join()
            connection.close()
    return outcome


def _stage(children: Sequence[tuple[Connection, Any]], outcome: Outcome, seconds: float) -> list[Any]:
    """The next message of each process; empty if there is none from each. `outcome` gets the reason."""
    messages, failed, pending = dict[int, Any](), dict[int, str](), dict(enumerate(children))
    deadline = time.monotonic() + seconds
    while pending and time.monotonic() < deadline:
        ready = wait([connection for connection, _ in pending.values()], 0.1)
        for rank in [rank for rank, (connection, _) in pending.items() if connection in ready]:
            found, failure = _read(*pending.pop(rank))
            if failure:
                failed[rank] = failure
                deadline = min(deadline, time.monotonic() + 2)  # the others may be about to fail, too
            elif found is not None:
                messages[rank] = found
    if failed:
        # if one fails, the others lose their connection
        rank = min(sorted(failed), key=lambda rank: OTHER_CALLS in failed[rank])
        outcome.failure = f"{f'process {rank}: ' if len(children) > 1 else ''}{failed[rank]}"
        if WAITS in outcome.failure and not messages:  # the others may only be slow
            outcome.late, outcome.failure = True, f"{outcome.failure}; allow more (--seconds)"
    elif pending:
        outcome.late, outcome.failure = True, f"a step takes more than {seconds:g} s; allow more (--seconds)"
    return [] if failed or pending else [messages[rank] for rank in sorted(messages)]


def _read(connection: Connection, process: Any) -> tuple[Any, str]:
    """The next message of a process, and why it failed; (None, "") if it has completed all stages."""
    try:
        message, failure = connection.recv()
    except (EOFError, ConnectionError):
        process.join()
        status = process.exitcode or 0
        aborted = " (as gloo does if the shapes of a sum differ)" * (status == -signal.SIGABRT)
        return None, f"the process {how_it_ended(status)}{aborted}"
    return message, failure


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


def where(error: BaseException) -> str:
    """An error in one line, with the line of the user's code."""
    if isinstance(error, Error):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    text = str(error).strip().splitlines() or [""]
    message = text[-1 if text[0].startswith("Traceback") else 0]  # MXNet's own traceback comes first
    message = re.sub(r"^(\[.+?\]|MXNetError:) ", "", message)[:160]  # without gloo's own line
    hint = next((hint for part, hint in HINTS.items() if re.search(part, str(error))), "")
    return f"{f'line {lines[-1]}: ' if lines else ''}{hint or f'{type(error).__name__}: {message}'}"
