"""MPI: starts together with the other processes of a run, and ends them."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import sys
import termios
import time
import traceback
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error

if TYPE_CHECKING:
    from mpi4py import MPI

SECONDS_TO_START = 120  # for all processes; MPI would wait forever for one that has failed before
SECONDS_FOR_WORKER_0 = 1.0
SECONDS_TO_READ = 2.0  # for mpiexec to read the error


def world() -> MPI.Intracomm:
    """All processes of the run, once all of them have called this. Raises Error if mpi4py is missing."""
    # The alarm ends this process, and then mpiexec ends the others. An alarm of the caller's does that, too.
    alarm = "mpi4py.MPI" not in sys.modules and not any(signal.getitimer(signal.ITIMER_REAL))
    if alarm:
        signal.alarm(SECONDS_TO_START)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an mpiexec of another library, which `join` refuses
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: the MPI library cannot be loaded
        raise Error(f"mpi4py cannot be imported ({error}): run `pip install mpi4py mpich`") from None
    finally:
        if alarm:
            signal.alarm(0)
    return MPI.COMM_WORLD


def fail(line: str, status: int, error: BaseException | None = None) -> NoReturn:
    """Print an error, and end this process and all others of the run with this status.

    error: printed with its traceback.
    """
    rank, comm = log.rank(), None
    if not rank:
        _print(line, error)
    if rank is not None:
        with suppress(Error):
            comm = world()  # the other processes may be waiting there
    if rank:  # worker 0 prints an error that all have; the first worker to print ends the others
        time.sleep(SECONDS_FOR_WORKER_0 + rank / 20)
        _print(f"worker {rank}: {line}", error)
    if comm is None:
        sys.exit(status)
    with suppress(OSError, ValueError):  # standard output may be what failed
        sys.stdout.flush()
    with suppress(OSError):  # standard error is not a pipe
        unread, until = array.array("i", [1]), time.monotonic() + SECONDS_TO_READ
        while unread[0] and time.monotonic() < until:  # mpiexec drops what it has not read when the run is aborted
            time.sleep(0.01)
            fcntl.ioctl(2, termios.FIONREAD, unread)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI would add a line of its own
    comm.Abort(status)
    os._exit(status)  # MPICH's Abort sometimes returns


def _print(line: str, error: BaseException | None) -> None:
    if error is not None:
        traceback.print_exception(type(error), error, error.__traceback__)
    log.error(line)
