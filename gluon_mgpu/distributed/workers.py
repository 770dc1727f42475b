"""The workers of a run as each of them sees them: what it sums with the others, and what it agrees on with them.

Gradients go over Horovod or over MXNet's own parameter servers; all else over `watch`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gluon_mgpu import __version__
from gluon_mgpu.distributed import heartbeat as watch
from gluon_mgpu.distributed import process as place
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError
from gluon_mgpu.training.settings import shard_sizes

if TYPE_CHECKING:
    import numpy as np
    from mxnet.ndarray import NDArray

    from gluon_mgpu.distributed.stores import DistSync, Horovod

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # a machine's own, also in its containers
NAMING = 5.0  # seconds within which a loss is named, where an operator noticed it first


class Workers:
    """Several processes. rank: this one's, from 0; count: how many there are. compress: as `join` was given it."""

    def __init__(
        self, store: Horovod | DistSync, member: watch.Member, rank: int, count: int, compress: str | None = None
    ) -> None:
        self.store, self.member, self.rank, self.count, self.compress = store, member, rank, count, compress
        self.gather, self.ask_to_stop, self.may_step = member.gather, member.ask_to_stop, member.may_step

    def meet(self, devices: int) -> list[int]:
        """How many devices each worker has. devices: how many this one has."""
        self.devices = self.gather(devices)
        return self.devices

    def part(self, n: int) -> slice:
        """The slice of n examples that this worker's devices take, where all devices of the run have even parts."""
        before = sum(self.devices[: self.rank])
        sizes = shard_sizes(n, sum(self.devices))
        start = sum(sizes[:before])
        return slice(start, start + sum(sizes[before : before + self.devices[self.rank]]))

    def on_failure(self, undo: Callable[[], object]) -> None:
        """Call undo() where another worker raises Error: this process then ends at once."""
        self.member.undo = undo

    def shown(self) -> tuple[str, ...]:
        return (f"as worker 0 of {self.count}",)

    def agree(self, facts: dict[str, Any]) -> None:
        """Raises UsageError where a worker's facts are not worker 0's. facts: {name: what JSON can hold}."""
        first, *others = self.gather({"version": __version__, **facts})
        for rank, other in enumerate(others, 1):
            for name in {**first, **other}:
                if first.get(name) != other.get(name):
                    raise UsageError(
                        f"worker {rank} has {name} {other.get(name)} where worker 0 has {first.get(name)}: start all "
                        "workers with the same options, data and version"
                    )

    @property
    def stopping(self) -> bool:
        """Whether one of the workers asked to stop."""
        return self.member.stopping

    def allreduce(self, array: NDArray, key: int | str) -> None:
        """Sum an NDArray over all workers, in place and behind Python, as any operator. key: its number, the same in
        all workers; the lower, the sooner it is needed."""
        self.store.allreduce(array, key)

    def broadcast(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """{name: NumPy array}: those of worker 0. The others' must have the same names, shapes and types."""
        from mxnet import nd

        given = {}
        for key, (name, array) in enumerate(arrays.items()):
            values = array if self.rank == 0 else array * 0
            given[name] = nd.array(values, dtype=array.dtype)
            self.store.allreduce(given[name], f"broadcast {key}")
        return {name: array.asnumpy() for name, array in given.items()}


class Alone(Workers):
    """One process, which has nobody to ask."""

    rank, count, stopping = 0, 1, False

    def __init__(self) -> None:
        pass

    def meet(self, devices: int) -> list[int]:
        return [devices]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, facts: dict[str, Any]) -> None:
        pass

    def part(self, n: int) -> slice:
        return slice(0, n)

    def on_failure(self, undo: Callable[[], object]) -> None:
        pass

    def shown(self) -> tuple[str, ...]:
        return ()


ALONE = Alone()


def bind(rank: int, gather: Callable[[Any], list[Any]]) -> None:
    """Keep this process to a part of the cores that workers of its machine have in common, each to another.

    Else the kernel puts Horovod's threads of all workers beside one of them, and the others wait for that one at every
    sum. Workers that have cores of their own keep them, and so do those that are more than the cores.
    """
    cores = sorted(os.sched_getaffinity(0))
    all_cores = gather([BOOT_ID.read_text(), cores])
    sharing = [other for other, found in enumerate(all_cores) if found == all_cores[rank]]
    if 1 < len(sharing) <= len(cores):
        first, end = (len(cores) * i // len(sharing) for i in (sharing.index(rank), sharing.index(rank) + 1))
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), cores[first:end])


@contextmanager
def _unheeded() -> Iterator[None]:
    """Without the next Ctrl-C or SIGTERM."""

    def as_before(*_: object) -> None:
        for which, handler in before.items():
            signal.signal(which, handler)

    main = threading.current_thread() is threading.main_thread()
    before = {s: signal.signal(s, as_before) for s in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield
    finally:
        as_before()


@contextmanager
def join(kvstore: str = "local", compress: str | None = None, model: str = "lenet") -> Iterator[Workers]:
    """This process as one of the Workers of a run, or ALONE for "local".

    kvstore: "local", "horovod" or "dist_sync". compress: what is sent of a gradient: "fp16" (horovod), or "2bit:0.5"
    for above 0.5, below -0.5 or neither, what is left being sent with a later step (dist_sync). model: of `Settings`.
    Waits until all are there. Where one is lost later, this process ends with a line that names it.
    Raises UsageError where the process was not started for that, Error where Horovod is missing or nobody answers.
    """
    here = place.asked(kvstore)
    place.check_compress(compress, here)
    if kvstore == "local":
        yield ALONE
        return
    engine.configure()
    from gluon_mgpu.distributed import stores

    hub = None
    if kvstore == "horovod":
        own = place.own_address()
        ring = stores.Horovod(compress, model)
        if here.rank == 0:
            hub = watch.Hub(own, 0, here.members())
        host, port = ring.from_worker_0(f"{own} {hub.port}" if hub else "").split()
        member = watch.Member(host, int(port), str(here), here.members())
        bind(here.rank, member.gather)
        store: Horovod | DistSync = ring
    else:
        member = watch.Member(here.root, here.port + 1, str(here), here.members())
        place.for_ps_lite(member.own_address, member.hub_address)
        with watch.ended_after(
            f"{here}: MXNet's parameter servers, which are all there, do not reach each other: open DMLC_PS_ROOT_PORT "
            "and the ports from 10,000 on between the machines",
            watch.PATIENCE,
        ):
            store = stores.DistSync(float(compress.partition(":")[2]) if compress else None)
    stopped = None
    try:
        yield Workers(store, member, here.rank, here.workers, compress)
    except Interrupted as error:  # as all workers do
        stopped = error
    except BaseException as error:
        if isinstance(error, Error):
            said = str(error), error.exit_status
        elif isinstance(error, KeyboardInterrupt):
            said = "interrupted", 130
        else:
            time.sleep(NAMING)  # the watch may say who was lost, and end this process
            said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}", 1
        member.failed(*said, undo=isinstance(error, Error))
        if hub:
            hub.close()  # which tells the others
        store.abandon()
        raise
    with _unheeded():  # a cluster may stop all, this one late
        member.gather(None)  # worker 0 may still be writing, and a launcher ends all once one has ended on Ctrl-C
        store.close()
        member.done()
        if hub:
            hub.close()
    if stopped:
        raise stopped
