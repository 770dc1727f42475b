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
import socket
import struct
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
MAX_PORT = 65534  # the scheduler also uses the next port
PORTS = range(10000, 32767)  # below Linux's ephemeral ports, which outgoing connections may use
POLL_INTERVAL = 0.02  # seconds
SECONDS_TO_NOTICE = 5  # seconds for the remaining processes to exit on their own after one has failed
SECONDS_TO_FINISH = 10  # seconds for the servers and the scheduler to exit after the last worker has exited
SECONDS_TO_INTERRUPT = 20  # seconds for the workers to save a checkpoint after Ctrl-C
SECONDS_TO_TERMINATE = 3  # seconds between SIGTERM and SIGKILL
LONGEST_DELAY = 60  # seconds; the delays before restarts are 1, 2, 4, 8, 16, 32, 60, 60, ...
CREDENTIALS = struct.Struct("iII")  # process, user and group ID of a message's sender
RESTARTED = "GLUON_MGPU_RESTARTED"  # environment variable that makes `train --out DIR` continue the run in DIR

# The first three would make ps-lite listen on the same port in every process, on no port, and on every interface,
# respectively. Each worker and each server gets its own DMLC_TASK_ID.
NOT_PASSED_ON = ("PORT", "DMLC_LOCAL", "DMLC_USE_KUBERNETES", "DMLC_TASK_ID")

# Each process runs this code before the command. It makes Linux kill the process when its parent exits for any reason.
# argv[1] is the parent's process ID; 1 is PR_SET_PDEATHSIG. preexec_fn is not used, because Python code between fork
# and exec can deadlock.
END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"error: {sys.argv[2]}: {error.strerror}")
"""


def launch(command: Sequence[str], workers: int, servers: int, port: int | None = None, restarts: int = 0) -> int:
    """Start all processes of a run, wait until they have exited, and return the exit status.

    command: program and arguments of every process. port: the scheduler's port; the scheduler also uses the next port;
    None: choose free ports. restarts: how many times all processes may be restarted if the status is 1. Call this in
    the main thread, which receives signals. Raises UsageError if the command does not exist or a port is in use.

    The status is 0 if no process fails, and 130 after Ctrl-C or SIGTERM. If a worker fails first with status 2 or 130,
    the status is the worker's. Otherwise, it is 1.
    """
    if not command:
        train = errors.command("train --kvstore dist_sync")
        raise UsageError(None, None, f"no command to run: add one at the end, such as -- {train}")
    users = engine.users_environment()
    if shutil.which(command[0], path=users.get("PATH")) is None:
        raise UsageError(None, command[0], "not found, or not an executable program")
    if port is not None:
        _check_ports(port)
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
    with _Events() as events:
        environment[log.LAUNCHER] = events.address
        for delay in [min(2**i, LONGEST_DELAY) for i in range(restarts)]:
            status = _run(command, environment, port, events)
            if status != 1 or events.interrupted:
                return status
            _say(f"gluon_mgpu: restarting all processes from the last checkpoint in {delay} s")
            try:
                events.wait(lambda: False, delay)
            except KeyboardInterrupt:
                return 130
            events.first_error = ""
            environment[RESTARTED] = "1"
        return _run(command, environment, port, events)


def _run(command: Sequence[str], environment: dict[str, str], port: int | None, events: _Events) -> int:
    """Start all processes, wait until they have exited, and return the exit status."""
    environment = {**environment, "DMLC_PS_ROOT_PORT": str(port or free_port())}
    workers, servers = (int(environment[name]) for name in ("DMLC_NUM_WORKER", "DMLC_NUM_SERVER"))
    processes: list[_Process] = []
    try:
        for role, count in (("scheduler", 1), ("server", servers), ("worker", workers)):
            for rank in range(count):
                processes.append(_Process(command, environment, role, rank))
        return _supervise(processes, events)
    finally:
        _kill(processes)


def _supervise(processes: list[_Process], events: _Events) -> int:
    """Wait until all processes have exited. If a process fails, or on Ctrl-C, terminate the rest. Returns the exit
    status."""
    workers = [p for p in processes if p.role == "worker"]
    try:
        _wait_for_workers(processes, workers, events)
        events.wait(lambda: _first_failed(processes) or _ended(processes), SECONDS_TO_FINISH)
    except KeyboardInterrupt:
        _interrupt(processes, workers, events)
        return 130
    failed = _first_failed(processes)
    error = events.error()
    if failed and (failed.returncode < 0 or not error):  # only the launcher knows that a signal killed a process
        error = f"{failed.name} {subprocesses.how_it_ended(failed.returncode)}"
    if error:
        _say(f"error: {error}")
    with suppress(KeyboardInterrupt):
        if failed:
            events.wait(lambda: _ended(processes), SECONDS_TO_NOTICE)
        elif not _ended(processes):
            _say(
                f"gluon_mgpu: stopping {_running(processes)}: still running {SECONDS_TO_FINISH} s after the last "
                "worker exited"
            )
        _terminate(processes, events)
    if not failed:
        return 0
    return failed.returncode if failed.role == "worker" and failed.returncode in (2, 130) else 1


def _wait_for_workers(processes: list[_Process], workers: list[_Process], events: _Events) -> None:
    """Wait until all workers have exited, or a process has failed. MXNet's parameter servers exit when all workers have
    closed their stores. A worker can then hang in ps-lite; a notice says so."""
    others = [p for p in processes if p.role != "worker"]
    events.wait(lambda: _first_failed(processes) or _ended(workers) or _ended(others))
    if not events.wait(lambda: _first_failed(processes) or _ended(workers), SECONDS_TO_FINISH):
        _say(
            f"gluon_mgpu: {_running(workers)}: still running {SECONDS_TO_FINISH} s after the servers exited; if it "
            "hangs, press Ctrl-C"
        )
        events.wait(lambda: _first_failed(processes) or _ended(workers))


def _interrupt(processes: list[_Process], workers: list[_Process], events: _Events) -> None:
    with suppress(KeyboardInterrupt):  # a second Ctrl-C cancels the wait
        _signal(workers, signal.SIGINT)
        if not events.wait(lambda: _ended(workers), SECONDS_TO_INTERRUPT):
            _say(f"gluon_mgpu: stopping {_running(workers)}: still running {SECONDS_TO_INTERRUPT} s after Ctrl-C")
        _terminate(processes, events)
    if events.error():
        _say(f"error: {events.error()}")


def _ended(processes: list[_Process]) -> bool:
    return all(p.poll() is not None for p in processes)


def _first_failed(processes: list[_Process]) -> _Process | None:
    """Return the process that failed first, or None. If several have failed since the last check, a process that a
    signal killed takes precedence, then a worker, because the other processes may have failed as a result."""
    failed = [p for p in processes if p.poll()]
    return min(failed, key=lambda p: (p.returncode > 0, p.role != "worker"), default=None)


def _running(processes: list[_Process]) -> str:
    return ", ".join(p.name for p in processes if p.poll() is None)


def _signal(processes: list[_Process], which: int) -> None:
    """Send a signal to all running processes and their children."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, which)


def _terminate(processes: list[_Process], events: _Events) -> None:
    _signal(processes, signal.SIGTERM)
    events.wait(lambda: _ended(processes), SECONDS_TO_TERMINATE)


def _kill(processes: list[_Process]) -> None:
    """Kill all remaining processes, including suspended processes and children of processes that have exited."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


class _Process(subprocess.Popen[bytes]):
    """A process of the run. Worker 0 inherits the launcher's stdin; only workers inherit its stdout."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], role: str, rank: int) -> None:
        first_worker = (role, rank) == ("worker", 0)
        task = {} if role == "scheduler" else {"DMLC_TASK_ID": str(rank)}
        super().__init__(
            [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *command],
            env={**environment, "DMLC_ROLE": role, **task},
            stdin=None if first_worker else subprocess.DEVNULL,
            stdout=None if role == "worker" else 2,  # standard error
            start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher, which passes it on
        )
        self.role, self.name = role, " ".join((role, *task.values(), f"(process {self.pid})"))


class _Events:
    """Receives Ctrl-C, SIGTERM, and errors that the processes report with `log.error`.

    Any user of this machine can send to the socket, but the kernel adds the sender's user ID to each message.
    """

    def __enter__(self) -> _Events:
        self._interrupt_pending = self.interrupted = False
        self.first_error = ""
        self._handlers = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._reports.bind("")  # Linux chooses an abstract address, which disappears with the socket
        self._reports.setblocking(False)
        self.address = self._reports.getsockname()[1:].decode()
        return self

    def __exit__(self, *_: object) -> None:
        self._reports.close()
        for which, handler in self._handlers.items():
            signal.signal(which, handler)

    def _interrupt(self, *_: object) -> None:
        self._interrupt_pending = self.interrupted = True

    def error(self) -> str:
        """Return the first error that any process reported, or ""."""
        with suppress(BlockingIOError):
            while True:
                line, [(_, _, credentials)], *_ = self._reports.recvmsg(1 << 16, socket.CMSG_SPACE(CREDENTIALS.size))
                _, user, _ = CREDENTIALS.unpack(credentials)
                if user == os.getuid():
                    self.first_error = self.first_error or line.decode(errors="replace")
        return self.first_error

    def wait(self, done: Callable[[], Any], seconds: float = math.inf) -> bool:
        """Wait until done() is true, but for at most `seconds` seconds. Returns whether done() became true.

        Raises KeyboardInterrupt after Ctrl-C or SIGTERM.
        """
        until = time.monotonic() + seconds
        while not done():
            if self._interrupt_pending:
                self._interrupt_pending = False
                raise KeyboardInterrupt
            if time.monotonic() > until:
                return False
            self.error()  # read the reports before the socket's short queue is full
            time.sleep(POLL_INTERVAL)
        return True


def free_port() -> int:
    """Find two adjacent free ports, and return the first. Raises Error if it finds none."""
    for port in random.sample(PORTS, 100):
        with suppress(UsageError):
            _check_ports(port)
            return port
    found = f"found no two adjacent free ports from {PORTS[0]} to {PORTS[-1] + 1}"
    raise Error(f"{found}: choose one with {errors.setting('port')}")


def _check_ports(port: int) -> None:
    for needed in (port, port + 1):
        try:
            heartbeat.listen(HOST, needed).close()
        except Error as error:
            raise UsageError("port", port, f"the scheduler needs ports {port} and {port + 1}: {error}") from None


def _say(line: str) -> None:
    below = "\n" if sys.stderr.isatty() else ""  # start below a progress bar
    print(f"{below}{log.printable(line)}", file=sys.stderr, flush=True)
