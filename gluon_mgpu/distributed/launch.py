"""MXNet's parameter-server roles on one machine: a scheduler, servers and workers, each a process of the same command.

`import mxnet` runs the role of a scheduler or a server where DMLC_ROLE asks for it. What is here starts the processes,
sees to it that they end together, and passes Ctrl-C on. Nothing here imports mxnet.
"""

from __future__ import annotations

import errno
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error, UsageError

HOST = "127.0.0.1"  # of all roles: nothing listens beyond this machine
MOST = 128  # of workers, and of servers
PORTS = range(10000, 32767)  # below those that Linux gives to any socket: what is free now is so when it is needed
SECONDS_TO_NOTICE = 5  # after one has failed, for the others to see it and end by themselves
SECONDS_TO_FINISH = 10  # after the last worker, for the servers and the scheduler
SECONDS_TO_INTERRUPT = 20  # after Ctrl-C, for the workers to end with a checkpoint
SECONDS_TO_TERMINATE = 3  # between SIGTERM and SIGKILL

# By these ps-lite would listen elsewhere: on one port in every process, on no port, on every interface.
NOT_PASSED_ON = ("PORT", "DMLC_LOCAL", "DMLC_USE_KUBERNETES", "DMLC_TASK_ID")

# Run in each process before the command: it is killed when its parent, argv[1], ends, in whatever way (1 is
# PR_SET_PDEATHSIG); what the command starts by itself is not. Not done between fork and exec, where Python code
# is unsafe beside NumPy's threads.
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


def launch(command: Sequence[str], workers: int, servers: int, port: int | None = None) -> int:
    """Run a command as each of the roles, and wait for all of them; returns the exit status.

    command: a list, program and arguments. workers, servers: how many of them. port: where the scheduler listens; it
    uses the next one too. None takes free ones. Call it in the main thread, to which signals are delivered.

    0 when every process ended with 0. Where one did not, a line on standard error names it, and the others are ended;
    the status is that of a worker if it is 1, 2 or 130, and 1 otherwise. 130 after Ctrl-C or SIGTERM, which the workers
    get as SIGINT. Raises UsageError, before anything is started, for values that cannot be.
    """
    for option, number in (("--workers", workers), ("--servers", servers)):
        if not 1 <= number <= MOST:
            raise UsageError(f"{option} {number}: give 1 to {MOST}")
    if not command:
        raise UsageError("no command to run: give it last, as in -- python scripts/train.py --kvstore dist_sync")
    users = engine.users_environment()
    if shutil.which(command[0], path=users.get("PATH")) is None:
        raise UsageError(f"{command[0]}: no such program, or not an executable one")
    everyones = {
        **{name: value for name, value in users.items() if name not in NOT_PASSED_ON},
        "DMLC_PS_ROOT_URI": HOST,
        "DMLC_PS_ROOT_PORT": str(_free_port() if port is None else _checked(port)),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NODE_HOST": HOST,
        "DMLC_INTERFACE": "lo",
        "GLUON_MGPU_LOCAL_WORKERS": str(workers),
    }
    processes = []
    with _Signals() as signals:
        try:
            for role, how_many in (("scheduler", 1), ("server", servers), ("worker", workers)):
                for number in range(how_many):
                    processes.append(_Process(command, everyones, role, number))
            return _watch(processes, signals)
        finally:
            _kill(processes)


def _watch(processes: list[_Process], signals: _Signals) -> int:
    """Wait until all have ended, and make them where one has failed or Ctrl-C was pressed; returns the exit status."""
    workers = [p for p in processes if p.role == "worker"]
    try:
        signals.wait(lambda: _first_failed(processes) or _ended(workers))
        signals.wait(lambda: _first_failed(processes) or _ended(processes), SECONDS_TO_FINISH)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):  # the second one
            _signal(workers, signal.SIGINT)
            if not signals.wait(lambda: _ended(workers), SECONDS_TO_INTERRUPT):
                _say(f"gluon_mgpu: {_names(workers)} did not end within {SECONDS_TO_INTERRUPT} s: ended now")
            _terminate(processes, signals)
        return 130
    failed = _first_failed(processes)
    with suppress(KeyboardInterrupt):
        if failed:
            _say(f"error: {failed.name} {failed.end()}")
            signals.wait(lambda: _ended(processes), SECONDS_TO_NOTICE)
        elif not _ended(processes):
            _say(f"gluon_mgpu: {_names(processes)} did not end within {SECONDS_TO_FINISH} s of the workers: ended now")
        _terminate(processes, signals)
    if not failed:
        return 0
    return failed.status if failed.role == "worker" and failed.status in (1, 2, 130) else 1


def _ended(processes: list[_Process]) -> bool:
    return all([p.ended() for p in processes])


def _first_failed(processes: list[_Process]) -> _Process | None:
    """The process that failed first, or None. Where several have failed since the last look, one that a signal ended,
    or else a worker: the others may have noticed, and ended themselves."""
    failed = [p for p in processes if p.ended() and p.status]
    return min(failed, key=lambda p: (p.status > 0, p.role != "worker"), default=None)


def _names(processes: list[_Process]) -> str:
    return ", ".join(p.name for p in processes if not p.ended())


def _signal(processes: list[_Process], which: int) -> None:
    """To those that have not ended, and to what they have started."""
    for process in processes:
        if not process.ended():
            os.killpg(process.popen.pid, which)


def _terminate(processes: list[_Process], signals: _Signals) -> None:
    _signal(processes, signal.SIGTERM)
    signals.wait(lambda: _ended(processes), SECONDS_TO_TERMINATE)


def _kill(processes: list[_Process]) -> None:
    """However things stand: nothing is left, also of what has been stopped, or started by a process that has ended."""
    for process in processes:
        os.killpg(process.popen.pid, signal.SIGKILL)
    for process in processes:
        process.popen.wait()


class _Process:
    def __init__(self, command: Sequence[str], everyones: dict[str, str], role: str, number: int) -> None:
        first_worker = (role, number) == ("worker", 0)
        task = {} if role == "scheduler" else {"DMLC_TASK_ID": str(number)}
        self.role, self.has_ended, self.status = role, False, 0
        self.popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", END_WITH_PARENT, str(os.getpid()), *command],
            env={**everyones, "DMLC_ROLE": role, **task},
            stdin=None if first_worker else subprocess.DEVNULL,
            stdout=None if role == "worker" else 2,  # standard error
            start_new_session=True,  # Ctrl-C on the terminal reaches it through here alone
        )
        self.name = " ".join((role, *task.values(), f"(process {self.popen.pid})"))

    def ended(self) -> bool:
        """Whether it has; `status` is then its exit status, or minus the signal that ended it. It stays a zombie, so
        that its number, which is its group's, cannot be given to another process before `_kill`."""
        if not self.has_ended:
            found = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found:
                self.has_ended = True
                self.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        return self.has_ended

    def end(self) -> str:
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"


class _Signals:
    """Ctrl-C, SIGTERM and the end of a child, as they come. Each one wakes `wait`, whichever thread it is given to."""

    def __enter__(self) -> _Signals:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        which = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM)
        self._handlers = {s: signal.signal(s, lambda *_: None) for s in which}
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self._handlers.items():
            signal.signal(which, handler)
        signal.set_wakeup_fd(self._fd)
        self._read.close()
        self._write.close()

    def wait(self, done: Callable[[], Any], seconds: float | None = None) -> bool:
        """Until done(), or for so long; returns whether it is done. Raises KeyboardInterrupt on Ctrl-C or SIGTERM."""
        until = None if seconds is None else time.monotonic() + seconds
        while not done():
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            if select.select([self._read], [], [], left)[0]:
                if {signal.SIGINT, signal.SIGTERM} & {*self._read.recv(4096)}:
                    raise KeyboardInterrupt
        return True


def _checked(port: int) -> int:
    if not 1 <= port <= 65534:
        raise UsageError(f"--port {port}: give 1 to 65534")
    for one in (port, port + 1):
        why = _not_free(one)
        if why:
            which = "" if one == port else f" {one}, which is needed too,"
            raise UsageError(f"--port {port}:{which} {why}; give another one, or none for a free one")
    return port


def _free_port() -> int:
    for port in random.sample(PORTS, 100):
        if not _not_free(port) and not _not_free(port + 1):
            return port
    raise Error(f"no two free ports next to each other from {PORTS[0]} to {PORTS[-1] + 1}: give --port")


def _not_free(port: int) -> str | None:
    """Why a process cannot listen on it, or None."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ps-lite does
        try:
            listener.bind((HOST, port))
        except OSError as error:
            return "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
    return None


def _say(line: str) -> None:
    print(f"\n{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)  # a progress bar may stand there
