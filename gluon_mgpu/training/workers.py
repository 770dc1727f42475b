"""The processes that train together: one, or several that mpiexec or srun has started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gluon_mgpu.compat import startup
from gluon_mgpu.data.splitting import shard_sizes
from gluon_mgpu.support import errors, log, mpi
from gluon_mgpu.support.errors import Error, Interrupted, UsageError, setting


class Group:
    """The processes of a run, as one of them sees them.

    comm: an MPI communicator; None: this process trains alone. rank: this process's number, from 0. size: their number.
    All processes must call a method at the same time, with values of the same shape; it returns when all have done so.
    """

    def __init__(self, comm: Any = None) -> None:
        self.comm = comm
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size

    def all_reduce(self, array: np.ndarray) -> np.ndarray:
        """Sum an array over all processes, in place."""
        if self.size > 1:
            from mpi4py import MPI

            self.comm.Allreduce(MPI.IN_PLACE, array)
        return array

    def total(self, number: float) -> float:
        """The sum of a number over all processes."""
        return float(self.all_reduce(np.array(number, np.float64)))

    def is_set_anywhere(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return self.total(flag) > 0

    def broadcast(self, value: Any) -> Any:
        """Send worker 0's value, which JSON can represent, to all processes."""
        if self.size == 1:
            return value
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        size = np.array(len(text))
        self.comm.Bcast(size)
        text = text.copy() if self.rank == 0 else np.empty(int(size), np.uint8)
        self.comm.Bcast(text)
        return json.loads(text.tobytes())

    def broadcast_arrays(self, arrays: dict[str, np.ndarray], rank: int = 0) -> dict[str, np.ndarray]:
        """Send one process's arrays to all. Each process passes arrays with the same names, shapes and types."""
        if self.size == 1:
            return arrays
        arrays = {name: np.array(array, order="C") for name, array in arrays.items()}
        for array in arrays.values():
            self.comm.Bcast(array, rank)
        return arrays

    def agree(self, values: dict[str, Any], advice: str) -> None:
        """Raise UsageError, with this advice, if a value differs from worker 0's value. Values are compared as JSON."""
        values = json.loads(json.dumps(values))
        of_worker_0 = self.broadcast(values)
        for name in {**of_worker_0, **values}:
            value, expected = values.get(name), of_worker_0.get(name)
            if value != expected:
                raise UsageError(None, f"{name} is {value} in worker {self.rank}, but {expected} in worker 0", advice)

    def local_indices(self, n: int, device_count: int) -> np.ndarray:
        """The indices of this process's examples among n, which are divided evenly among the devices of all processes.
        device_count: the number of devices of each process."""
        sizes = shard_sizes(n, self.size * device_count)
        start = sum(sizes[: self.rank * device_count])
        return np.arange(start, start + sum(sizes[self.rank * device_count :][:device_count]))


def _sharing_cores(comm: Any) -> int:
    """The number of workers on this process's cores. comm: the workers on this machine.

    srun may have given each worker cores of its own.
    """
    mine = np.zeros(8192, np.uint8)  # Linux's largest number of cores
    mine[[*startup.affinity()]] = 1
    cores = np.empty((comm.size, len(mine)), np.uint8)
    comm.Allgather(mine, cores)
    return int((cores & mine).any(axis=1).sum())


@contextmanager
def join(kvstore: str) -> Iterator[Group]:
    """Join the other processes of a run. kvstore: "local" for a single process, or "mpi".

    If the `with` block fails in one of several processes, that process prints the error and ends all of them: the
    others may not have failed, and would wait for it. So with "mpi", `except Error` around this block has no effect.
    Raises UsageError if this process was not started for this kvstore, and Error if mpi4py is missing.
    """
    if kvstore == "local":
        if log.rank() is not None and log.size() != 1:
            advice = f"mpiexec has started this process; use {setting('kvstore', 'mpi')}, or start it without mpiexec"
            raise UsageError("kvstore", kvstore, advice)
        yield Group()
        return
    if log.rank() is None:
        start = f"`mpiexec -n 2 {errors.command('train')} ... --kvstore mpi`"
        raise UsageError("kvstore", kvstore, f"needs processes that mpiexec has started: {start}")
    comm = mpi.world()
    from mpi4py import MPI

    if log.size() not in (None, comm.size):
        library = " ".join(MPI.Get_library_version().split("\n")[0].split())
        advice = f"{log.size()} processes were started, but not by the mpiexec of mpi4py's library, {library}"
        raise UsageError("kvstore", kvstore, advice)
    try:
        startup.plan(processes=_sharing_cores(comm.Split_type(MPI.COMM_TYPE_SHARED)))
        yield Group(comm)
    except Interrupted:  # raised by all workers at the same step
        comm.Barrier()
        raise
    except BaseException as error:
        trace = error if errors.caller.tracebacks else None
        if isinstance(error, KeyboardInterrupt):
            mpi.fail("interrupted", 130, trace)
        line = errors.reason(error) if trace or isinstance(error, Error) else errors.line_of(error)
        mpi.fail(line, getattr(error, "exit_status", 1), trace)
    comm.Barrier()  # worker 0 may still be writing
