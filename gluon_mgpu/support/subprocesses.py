"""Runs a program in a child process. When `run` returns or raises, no process of the program is left running, except
those that have moved to a session of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from gluon_mgpu.support.errors import Error, UsageError

SECONDS_TO_STOP = 10  # seconds for the program to save its results after Ctrl-C
LINES, LONGEST = 10_000, 10_000  # the last lines that are kept, and their characters; a program may print without end
END = "\0end of output\n"  # `run` itself writes this into a pipe that a process in another session may keep open


running: set[subprocess.Popen[str]] = set()  # processes that `run` has started

# What `compat.startup` changed: {variable: (the user's value, new value)}; None: not set
set_by_startup: dict[str, tuple[str | None, str | None]] = {}


class Finished(NamedTuple):
    """status: the exit status; the negated signal number if a signal killed the process; None if it timed out."""

    status: int | None
    out: str
    err: str


def users_environment() -> dict[str, str]:
    """The environment without the changes in `set_by_startup`, for a child process that calls `configure` itself."""
    restored = {name: before for name, (before, after) in set_by_startup.items() if os.environ.get(name) == after}
    return {name: value for name, value in {**os.environ, **restored}.items() if value is not None}


def python(code: str) -> list[str]:
    """The command that runs code in a new Python process, where modules in the current folder hide no others."""
    root = str(Path(__file__).parents[2])  # for a package that is not installed
    return [sys.executable, "-c", f"import sys; sys.path = [*filter(None, sys.path), {root!r}]\n{code}"]


def kill_running() -> None:
    """Kill the programs that `run` has started in other threads, which Ctrl-C does not interrupt."""
    for process in [*running]:
        process.kill()


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    seconds: float | None = None,
    on_line: Callable[[str], object] | None = None,
) -> Finished:
    """Run a program until it exits. On Ctrl-C, it receives SIGINT and has SECONDS_TO_STOP seconds to exit.

    command: program and arguments. env: all environment variables; None: the user's (`users_environment`).
    folder: the working directory. seconds: time limit. on_line: called with each line of standard output as it arrives.
    Notices that the program writes to standard error are printed at once. Raises OSError if the program cannot start.
    """
    process = subprocess.Popen(
        command,
        env=users_environment() if env is None else env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C in the terminal reaches the program only through this process
    )
    running.add(process)
    assert process.stdout and process.stderr
    out: deque[str] = deque(maxlen=LINES)
    err: deque[str] = deque(maxlen=LINES)
    readers = [
        threading.Thread(target=_read, args=(process.stdout, out, on_line), daemon=True),
        threading.Thread(target=_read, args=(process.stderr, err, _pass_notice_on), daemon=True),
    ]
    status: int | None = None
    try:
        for reader in readers:
            reader.start()
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(seconds)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
        raise
    finally:
        running.discard(process)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # SIGKILL cannot stop a process that hangs in a driver
            process.wait(1)
        for stream, reader in zip((process.stdout, process.stderr), readers):
            if reader.is_alive():
                Path(f"/proc/self/fd/{stream.fileno()}").write_text(END)
                reader.join()
    return Finished(status, "".join(out), "".join(err))


def raise_for_status(name: str, finished: Finished, advice: str = "") -> None:
    """Raise Error or UsageError unless the program succeeded; the message is the program's own error message, if any.

    name: the program's name in the message. advice: what to do if the program timed out.
    """
    if finished.status == 0:
        return
    if finished.status is None:
        raise Error(f"{name} did not finish in time{advice and f': {advice}'}")
    lines = finished.err.strip().splitlines()
    errors = [match for line in lines if (match := re.match(r"(?:error|[\w.]+\.(Error|UsageError)): (.*)", line))]
    if errors:  # the error is usually the last line, but a launcher may have added lines
        kind, message = errors[-1][1], f"{name}: {errors[-1][2]}"
    else:
        kind, message = None, f"{name} {how_it_ended(finished.status)}: {lines[-1] if lines else 'no message'}"
    raise UsageError(None, None, message) if finished.status == 2 or kind == "UsageError" else Error(message)


def how_it_ended(status: int) -> str:
    """Describe a process's exit status; a negative status is a signal's negated number."""
    if status >= 0:
        return f"exited with status {status}"
    names = {int(known): known.name for known in signal.Signals}  # real-time signals have no names
    return f"was killed by {names.get(-status, f'signal {-status}')}"


def _read(stream: IO[str], lines: deque[str], on_line: Callable[[str], object] | None) -> None:
    for text in iter(lambda: stream.readline(LONGEST), ""):
        line = text.replace(END, "")
        if line:
            lines.append(line)
            if on_line:
                with suppress(OSError):  # the reader of this process's output may be gone
                    on_line(line)
        if line != text:
            return


def _pass_notice_on(line: str) -> None:
    if line.startswith("gluon_mgpu: "):
        from tqdm import tqdm

        tqdm.write(line, file=sys.stderr, end="")
