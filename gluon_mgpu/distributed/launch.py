"""Starts all processes of a dist_sync run on this machine: a scheduler, servers and workers.

Each process runs the same command and reads its role from DMLC_ROLE. The command can be any MXNet program, because in a
scheduler or server process, `import mxnet` itself runs the scheduler or server. This module does not import mxnet.
"""

from __future__ import annotations

import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gluon_mgpu.distributed import heartbeat
from gluon_mgpu.distributed.process import SECRET
from gluon_mgpu.runtime import engine, errors, log, subprocesses
from gluon_mgpu.runtime.errors import Error, UsageError

HOST = "127.0.0.1"  # other machines cannot connect
MAX_PROCESSES = 128  # limit on the number of workers, and on the number of servers
MAX_RESTARTS = 1000
PORTS = range(10000, 32767)  # below Linux's ephemeral ports, which outgoing connections may use
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
POLL_INTERVAL = 0.02  # seconds
SECONDS_TO_NOTICE = 5  # seconds for the remaining processes to exit on their own after one has failed
SECONDS_TO_FINISH = 10  # seconds for the servers and the scheduler to exit after the last worker has exited
SECONDS_TO_INTERRUPT = 20  # seconds for the workers to save a checkpoint after Ctrl-C
SECONDS_TO_TERMINATE = 3  # seconds between SIGTERM and SIGKILL
LONGEST_DELAY = 60  # seconds; the delays before restarts are 1, 2, 4, 8, 16, 32, 60, 60, ...
RESTARTED = "GLUON_MGPU_RESTARTED"  # environment variable that makes `train --out DIR` continue the run in DIR

# The first three would make ps-lite listen on the same port in every process, on no port, and on every interface,
# respectively. Each worker and each server gets its own DMLC_TASK_ID.
NOT_PASSED_ON = ("PORT", "DMLC_LOCAL", "DMLC_USE_KUBERNETES", "DMLC_TASK_ID")

# Each process runs this code before the command. It makes Linux kill the process when its parent exits for any reason.
# argv[1] is the parent's process ID; 1 is PR_SET_PDEATHSIG. preexec_fn is not used, because Python code between fork
# and exec can deadlock.
END_WITH_PARENT = """
import ctypes, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"error: {sys.argv[2]}: {error.strerror}")
"""


def launch(command: Sequence[str], workers: int, servers: int, restarts: int = 0) -> int:
    """Start all processes of a run, wait until they have exited, and return the exit status.

    command: program and arguments of every process. restarts: how many times all processes may be restarted if the
    status is 1. Call this in the main thread, which receives signals. Raises UsageError if the command does not exist.

    The status is 0 if no process fails, and 130 after Ctrl-C or SIGTERM. If a worker fails first with status 2 or 130,
    the status is the worker's. Otherwise, it is 1.
    """
    if not command:
        raise UsageError(None, None, f"add a command, such as -- {errors.command('train --kvstore dist_sync')}")
    users = engine.users_environment()
    if shutil.which(command[0], path=users.get("PATH")) is None:
        raise UsageError(None, command[0], "not found, or not an executable program")
    environment = {
        **{name: value for name, value in users.items() if name not in NOT_PASSED_ON},
        "DMLC_PS_ROOT_URI": HOST,
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NODE_HOST": HOST,
        "DMLC_INTERFACE": "lo",
        "GLUON_MGPU_LOCAL_WORKERS": str(workers),
        SECRET: secrets.token_hex(16),
    }
    delays = [min(2**i, LONGEST_DELAY) for i in range(restarts)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)  # `_wait` receives these signals
    try:
        for delay in delays:
            status = _run(command, environment)
            if status != 1:
                return status
            _say(f"gluon_mgpu: restarting all processes from the last checkpoint in {delay} s")
            _wait(lambda: False, delay)
            environment[RESTARTED] = "1"
        return _run(command, environment)
    except KeyboardInterrupt:
        return 130
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Start all processes, wait until they have exited, and return the exit status."""
    servers, workers = int(environment["DMLC_NUM_SERVER"]), int(environment["DMLC_NUM_WORKER"])
    reports, writer = os.pipe()  # `log.error` writes to this pipe; only this user's processes can open its path
    os.set_blocking(reports, False)
    path = f"/proc/{os.getpid()}/fd/{writer}"
    environment = {**environment, "DMLC_PS_ROOT_PORT": str(free_port()), log.LAUNCHER: path}
    processes: list[_Process] = []
    try:
        for role, count in (("scheduler", 1), ("server", servers), ("worker", workers)):
            for rank in range(count):
                processes.append(_Process(command, environment, role, rank))
        return _supervise(processes, reports)
    finally:
        for process in processes:  # also suspended processes, and children of processes that have exited
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
        os.close(reports)
        os.close(writer)


def _supervise(processes: list[_Process], reports: int) -> int:
    """Wait until all processes have exited. If a process fails, or on Ctrl-C, terminate the rest. Returns the exit
    status. reports: the pipe from which to read the errors that the processes report."""
    workers = [p for p in processes if p.role == "worker"]
    try:
        _wait(lambda: _first_failed(processes) or _ended(workers))
        _wait(lambda: _first_failed(processes) or _ended(processes), SECONDS_TO_FINISH)
    except KeyboardInterrupt:
        _signal(workers, signal.SIGINT)
        _wait(lambda: _ended(workers), SECONDS_TO_INTERRUPT)
        _terminate(processes, workers, f"{SECONDS_TO_INTERRUPT} s after Ctrl-C")
        if error := _first_error(reports):
            _say(f"error: {error}")
        raise
    failed = _first_failed(processes)
    if not failed:
        _terminate(processes, processes, f"{SECONDS_TO_FINISH} s after the last worker exited")
        return 0
    error = _first_error(reports)
    if failed.returncode < 0 or not error:  # only the launcher knows that a signal killed a process
        error = f"{failed.name} {subprocesses.how_it_ended(failed.returncode)}"
    _say(f"error: {error}")
    _wait(lambda: _ended(processes), SECONDS_TO_NOTICE)
    _terminate(processes)
    return failed.returncode if failed.role == "worker" and failed.returncode in (2, 130) else 1


def _wait(done: Callable[[], Any], seconds: float = math.inf) -> None:
    """Wait until done() is true, but for at most `seconds` seconds. Raises KeyboardInterrupt after Ctrl-C or
    SIGTERM."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        if signal.sigtimedwait(INTERRUPTS, POLL_INTERVAL):
            raise KeyboardInterrupt


def _ended(processes: list[_Process]) -> bool:
    return all(p.poll() is not None for p in processes)


def _first_failed(processes: list[_Process]) -> _Process | None:
    """Return the process that failed first, or None. If several have failed since the last check, a process that a
    signal killed takes precedence, then a worker, because the other processes may have failed as a result."""
    failed = [p for p in processes if p.poll()]
    return min(failed, key=lambda p: (p.returncode > 0, p.role != "worker"), default=None)


def _first_error(reports: int) -> str:
    """Return the first error that any process has reported, or ""."""
    with suppress(BlockingIOError):
        return os.read(reports, 1 << 16).decode(errors="replace").partition("\n")[0]
    return ""


def _signal(processes: list[_Process], which: int) -> None:
    """Send a signal to all running processes and their children."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, which)


def _terminate(processes: list[_Process], awaited: Sequence[_Process] = (), when: str = "") -> None:
    """Send SIGTERM to all running processes. A notice names those that were expected to exit on their own."""
    late = ", ".join(p.name for p in awaited if p.poll() is None)
    if late:
        _say(f"gluon_mgpu: stopping {late}: still running {when}")
    _signal(processes, signal.SIGTERM)
    _wait(lambda: _ended(processes), SECONDS_TO_TERMINATE)


class _Process(subprocess.Popen[bytes]):
    """A process of the run. Worker 0 inherits the launcher's stdin; only workers inherit its stdout."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], role: str, rank: int) -> None:
        task = {} if role == "scheduler" else {"DMLC_TASK_ID": str(rank)}
        super().__init__(
            [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *command],
            env={**environment, "DMLC_ROLE": role, **task},
            stdin=None if (role, rank) == ("worker", 0) else subprocess.DEVNULL,
            stdout=None if role == "worker" else 2,  # standard error
            start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher, which passes it on
        )
        self.role, self.name = role, " ".join((role, *task.values(), f"(process {self.pid})"))


def free_port() -> int:
    """Find two adjacent free ports, and return the first. Raises Error if it finds none."""
    for port in random.sample(PORTS, 100):
        with suppress(Error):
            for needed in (port, port + 1):  # ps-lite's scheduler, and the coordinator
                heartbeat.listen(HOST, needed).close()
            return port
    raise Error(f"found no two adjacent free ports from {PORTS[0]} to {PORTS[-1] + 1}")


def _say(line: str) -> None:
    below = "\n" if sys.stderr.isatty() else ""  # start below a progress bar
    print(f"{below}{log.printable(line)}", file=sys.stderr, flush=True)
