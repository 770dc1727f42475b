"""The processes that train together: one, or several that mpiexec or srun has started, connected by MPI."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gluon_mgpu.data.splitting import shard_sizes
from gluon_mgpu.runtime import engine, errors, log
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError, setting

SECONDS_FOR_WORKER_0 = 1.0


class Group:
    """The processes of a run, as one of them sees them. rank: this process's number, from 0. size: their number.

    All processes must call a method at the same time, with values of the same shape; it returns when all have done so.
    """

    def __init__(self, comm: Any = None) -> None:
        """comm: an MPI communicator; None: this process trains alone."""
        self.comm = comm
        self.rank: int = comm.rank if comm else 0
        self.size: int = comm.size if comm else 1

    def allreduce(self, array: np.ndarray) -> np.ndarray:
        """Sum an array over all processes, in place."""
        if self.comm:
            from mpi4py import MPI

            self.comm.Allreduce(MPI.IN_PLACE, array)
        return array

    def sum(self, number: float) -> float:
        return float(self.allreduce(np.array(number, np.float64)))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return self.sum(flag) > 0

    def broadcast(self, value: Any) -> Any:
        """Send worker 0's value, which JSON can represent, to all processes."""
        if not self.comm:
            return json.loads(json.dumps(value))
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        size = np.array(len(text))
        self.comm.Bcast(size)
        text = text.copy() if self.rank == 0 else np.empty(int(size), np.uint8)
        self.comm.Bcast(text)
        return json.loads(text.tobytes())

    def broadcast_arrays(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Send worker 0's arrays to all processes. Each process passes arrays with the same names, shapes and types."""
        if self.comm:
            arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            for array in arrays.values():
                self.comm.Bcast(array)
        return arrays

    def agree(self, values: dict[str, Any]) -> None:
        """Raise UsageError if a value differs from worker 0's value."""
        for name, value in self.broadcast(values).items():
            local = json.loads(json.dumps(values.get(name)))
            if local != value:
                both = f"worker {self.rank} has {name} {local}, but worker 0 has {value}"
                raise UsageError(None, both, "start all workers with the same options, data and version")

    def part(self, n: int, device_count: int) -> slice:
        """This process's slice of n examples, which are divided evenly among the devices of all processes.

        device_count: the number of devices of each process."""
        sizes = shard_sizes(n, self.size * device_count)
        start = sum(sizes[: self.rank * device_count])
        return slice(start, start + sum(sizes[self.rank * device_count :][:device_count]))


@contextmanager
def join(kvstore: str) -> Iterator[Group]:
    """Join the other processes of a run. kvstore: "local" for a single process, or "mpi".

    If the `with` block fails in one of several processes, that process prints the error and ends all of them. Raises
    UsageError if this process was not started for this kvstore, and Error if mpi4py is missing.
    """
    if kvstore == "local":
        if log.rank() is not None:
            advice = f"mpiexec has started this process; use {setting('kvstore', 'mpi')}, or start it without mpiexec"
            raise UsageError("kvstore", kvstore, advice)
        yield Group()
        return
    if log.rank() is None:
        start = f"`mpiexec -n 2 {errors.command('train')} ... {setting('kvstore', 'mpi')}`"
        raise UsageError("kvstore", kvstore, f"needs processes that mpiexec has started: {start}")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: the MPI library cannot be loaded
        raise Error(f"mpi4py cannot be imported ({error}): run `pip install mpi4py mpich`") from None
    comm = MPI.COMM_WORLD
    sharing = comm.Split_type(MPI.COMM_TYPE_SHARED)  # the workers on this machine, which share its cores
    engine.plan(processes=sharing.size, workers=comm.size)
    try:
        yield Group(comm)
    except Interrupted:  # raised by all workers at the same step
        raise
    except BaseException as error:
        _end_all(comm, error)
    comm.Barrier()  # worker 0 may still be writing


def _end_all(comm: Any, error: BaseException) -> None:
    """Print an error, and end all processes with its status."""
    if comm.rank and isinstance(error, Error):
        time.sleep(SECONDS_FOR_WORKER_0)  # worker 0 has the same error, unless only this machine is at fault
    if "--debug" in sys.argv or not errors.in_command():
        traceback.print_exception(type(error), error, error.__traceback__)
    interrupted = isinstance(error, KeyboardInterrupt)
    line = "interrupted" if interrupted else str(error) if isinstance(error, Error) else errors.line_of(error)
    log.error(f"worker {comm.rank}: {line}" if comm.rank else line)
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # MPI would add a line of its own
    comm.Abort(130 if interrupted else getattr(error, "exit_status", 1))
