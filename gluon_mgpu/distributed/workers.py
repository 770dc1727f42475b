"""Lets the workers of a run sum arrays and agree on values.

Horovod or MXNet's parameter servers transfer the arrays (`stores`). The heartbeat connection transfers all other values
(`heartbeat`).
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gluon_mgpu import __version__
from gluon_mgpu.data.splitting import shard_sizes
from gluon_mgpu.distributed import heartbeat, process
from gluon_mgpu.distributed.process import Process
from gluon_mgpu.runtime import engine, errors
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError

if TYPE_CHECKING:
    import numpy as np
    from mxnet.ndarray import NDArray

    from gluon_mgpu.distributed.stores import DistSync, Horovod

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # identifies the machine; all containers on it have the same ID
SECONDS_TO_BLAME = 5.0  # seconds that a worker waits after an unexpected error, in case a lost process caused it


@dataclass(eq=False)
class Workers:
    """One worker's view of all workers in a run. The defaults describe a process that trains alone.

    store: sums arrays. client: this worker's heartbeat connection. rank: this worker's rank, from 0. count: number of
    workers. coordinator: only in worker 0 with Horovod. devices: each worker's device count.
    """

    store: Horovod | DistSync | None = None
    client: heartbeat.Client | None = None
    rank: int = 0
    count: int = 1
    coordinator: heartbeat.Coordinator | None = None
    devices: Sequence[int] = (1,)

    @property
    def stopping(self) -> bool:
        """Whether any worker has asked to stop."""
        return self.client is not None and self.client.stopping

    def all_gather(self, value: Any) -> list[Any]:
        """Collect one JSON value per worker, in rank order. Waits for all workers. value: this worker's value."""
        return self.client.all_gather(value) if self.client else [value]

    def exchange_device_counts(self, devices: int) -> Sequence[int]:
        """Return every worker's device count, in rank order. devices: this worker's count. Call this before `part`."""
        self.devices = self.all_gather(devices)
        return self.devices

    def part(self, n: int) -> slice:
        """Return this worker's slice of n examples, which are divided evenly among the devices of all workers."""
        sizes = shard_sizes(n, sum(self.devices))
        first = sum(self.devices[: self.rank])
        start = sum(sizes[:first])
        return slice(start, start + sum(sizes[first : first + self.devices[self.rank]]))

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise UsageError if any worker's facts differ from worker 0's facts. facts: {name: any JSON value}."""
        first, *others = self.all_gather({"version": __version__, **facts})
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    both = f"worker {rank} has {name} {other.get(name)}, but worker 0 has {first.get(name)}"
                    raise UsageError(None, both, "start all workers with the same options, data and version")

    def allreduce(self, array: NDArray, key: int | str) -> None:
        """Sum an array over all workers, in place. Like an MXNet operator, this runs asynchronously.

        key: identifies the array in all workers; an int for a gradient (lower keys are sent first), a str for any other
        array.
        """
        if self.store:
            self.store.allreduce(array, key)

    def broadcast(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Send worker 0's arrays to all workers. Every worker passes arrays with the same names, shapes and types."""
        from mxnet import nd

        sums = {}
        for i, (name, array) in enumerate(arrays.items()):
            sums[name] = nd.array(array if self.rank == 0 else array * 0, dtype=array.dtype)
            self.allreduce(sums[name], f"broadcast {i}")
        return {name: array.asnumpy() for name, array in sums.items()}

    def ask_to_stop(self) -> bool:
        """Ask all workers to stop at the same step. Returns False if there are no other workers."""
        return self.client is not None and self.client.ask_to_stop()

    def advise(self, what_to_do: str) -> None:
        """Set the advice at the end of the error message for a lost process."""
        if self.client:
            self.client.advice = what_to_do

    def may_step(self, step: int) -> bool:
        """Whether this worker may issue step number `step`, counted from 0. After a request to stop, this becomes False
        when all workers have issued the same number of steps."""
        return self.client is None or self.client.may_step(step)

    def leave(self) -> None:
        """Wait until all workers have finished or stopped, and leave the run."""
        with _one_signal_ignored():  # a cluster manager signals every process; its signal may arrive late
            try:
                # Worker 0 may still be writing, and a launcher stops all workers when one worker exits.
                self.all_gather(None)
            except KeyboardInterrupt as error:
                self.fail(error)
                raise
            assert self.store and self.client  # a process that trains alone does not leave
            self.store.close()
            self.client.close()
            if self.coordinator:
                self.coordinator.close()

    def fail(self, error: BaseException) -> None:
        """Tell the other processes that this worker failed, so that they exit too."""
        line, status = errors.reason(error), getattr(error, "exit_status", 1)
        if isinstance(error, KeyboardInterrupt):
            line, status = "interrupted", 130
        elif not isinstance(error, Error):
            time.sleep(SECONDS_TO_BLAME)  # if a lost process is the cause, the heartbeat meanwhile ends this process
        if self.client:
            self.client.close(line, status)
        if self.coordinator:
            self.coordinator.close()  # waits until the other processes have been told


ALONE = Workers()


@contextmanager
def join(kvstore: str = "local", compress: str | None = None) -> Iterator[Workers]:
    """Join a run, and yield its Workers, or ALONE for "local". Waits until all processes of the run are connected.

    kvstore: "local", "horovod" or "dist_sync". compress: "fp16" sends gradients as float16
    (horovod); "2bit:T" sends T, -T or 0 for each element and adds the remainder to the next step's gradient
    (dist_sync). If a process of the run is lost later, this process exits, and an error message names the lost process.
    Raises UsageError if this process was not started for this kvstore, and Error if Horovod is missing or connecting
    fails.
    """
    here = process.require(kvstore)
    process.check_compress(compress, here)
    if kvstore == "local":
        yield ALONE
        return
    engine.configure()
    workers = _join_horovod(here, compress) if kvstore == "horovod" else _join_dist_sync(here, compress)
    try:
        yield workers
    except Interrupted:  # all workers have stopped at the same step
        workers.leave()
        raise
    except BaseException as error:
        workers.fail(error)
        raise
    workers.leave()


def _join_horovod(here: Process, compress: str | None) -> Workers:
    from gluon_mgpu.distributed import stores

    own_address = process.horovod_address()
    store = stores.Horovod(compress, here.workers)
    here = here._replace(secret=secrets.token_hex(16))
    coordinator = heartbeat.Coordinator(here, own_address, 0) if here.rank == 0 else None
    address = store.from_worker_0(f"{own_address} {coordinator.port} {here.secret}" if coordinator else "")
    host, port, secret = address.split()
    client = heartbeat.Client(here._replace(secret=secret), host, int(port))
    pin_to_cores(here.rank, client.all_gather)
    return Workers(store, client, here.rank, here.workers, coordinator)


def _join_dist_sync(here: Process, compress: str | None) -> Workers:
    from gluon_mgpu.distributed import stores

    client = heartbeat.Client(here, here.root, here.port + 1)
    process.prepare_ps_lite(client.own_address, client.coordinator_address)
    blocked = (
        f"{here}: MXNet's parameter servers cannot reach each other: open DMLC_PS_ROOT_PORT and ports above 10,000"
    )
    time_limit = heartbeat.after(heartbeat.CONNECT_LIMIT, heartbeat.end_process, blocked, 1, heartbeat.BEAT_INTERVAL)
    store = stores.DistSync(float(compress.partition(":")[2]) if compress else None)
    time_limit.cancel()
    return Workers(store, client, here.rank, here.workers)


def pin_to_cores(rank: int, all_gather: Callable[[Any], list[Any]]) -> None:
    """Pin each worker on this machine to its own subset of the cores, if there are enough cores.

    Without pinning, the kernel may run the Horovod threads of all workers on one core, and every sum then waits for
    that core. If the workers are already limited to different cores, nothing changes.
    """
    cores = sorted(os.sched_getaffinity(0))
    here = [BOOT_ID.read_text(), cores]
    sharing = [other for other, there in enumerate(all_gather(here)) if there == here]
    if not 1 < len(sharing) <= len(cores):
        return
    i = sharing.index(rank)
    own = cores[len(cores) * i // len(sharing) : len(cores) * (i + 1) // len(sharing)]
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has exited
            os.sched_setaffinity(int(thread), own)


@contextmanager
def _one_signal_ignored() -> Iterator[None]:
    """Ignore the first Ctrl-C or SIGTERM inside the `with` block."""
    main = threading.current_thread() is threading.main_thread()  # only the main thread can set signal handlers
    before = {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM) if main}

    def restore(*_: object) -> None:
        for which, handler in before.items():
            signal.signal(which, handler)

    for which in before:
        signal.signal(which, restore)
    try:
        yield
    finally:
        restore()
