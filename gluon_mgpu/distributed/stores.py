"""What sums arrays over the workers of a run: Horovod, or MXNet's parameter servers; and how gluon.Trainer uses it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import mxnet as mx
from mxnet import Context, kvstore, nd
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import shared_memory

if TYPE_CHECKING:
    from gluon_mgpu.distributed.workers import Workers

# ms from one look of Horovod's at what all workers have ready to the next, where its own 1 ms is short beside a step: a
# look costs each of them some 60 µs.
CYCLES = {"resnet18": "8"}
FUSED = 4 << 20  # bytes: arrays are copied together up to that many, and a larger one is summed where it lies


class Horovod:
    """A ring of workers. Source: Horovod 0.28.1's horovod.mxnet. model: of `Settings`."""

    def __init__(self, compress: str | None, model: str) -> None:
        try:
            import horovod.mxnet as hvd
        except (ImportError, OSError) as error:  # OSError: built for another MXNet, it does not load
            raise Error(f"Horovod is not installed for this MXNet ({error}): `make horovod` builds it") from None
        self.hvd, self.compress = hvd, compress
        os.environ.setdefault("HOROVOD_CYCLE_TIME", CYCLES.get(model, "1"))
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSED))
        hvd.init()

    def allreduce(self, array: NDArray, key: int | str) -> None:
        sent = (
            array.as_in_context(mx.cpu()) if array.context.device_type == "gpu" else array
        )  # it is built without CUDA
        if self.compress and isinstance(key, int):  # a gradient
            sent = sent.astype("float16")
        self.hvd.allreduce_(sent, average=False, name=str(key), priority=-key if isinstance(key, int) else 0)
        if sent is not array:
            sent.astype(array.dtype).copyto(array)

    def from_worker_0(self, text: str) -> str:
        """The text that worker 0 gave."""
        sent = nd.array(list(text.encode().ljust(256)), dtype="int32")
        return bytes(self.hvd.broadcast(sent, root_rank=0, name="address").asnumpy().astype("uint8")).decode().strip()

    def close(self) -> None:
        self.hvd.shutdown()

    def abandon(self) -> None:
        """Others may be gone."""


class DistSync:
    """MXNet's parameter servers (ps-lite), each with a part of the arrays. They sum, and update nothing."""

    def __init__(self, compress: float | None) -> None:
        self.kv = mx.kv.create("dist_sync")
        self.threshold, self.compressing = compress, False
        self.known: set[str] = set()

    def allreduce(self, array: NDArray, key: int | str) -> None:
        name = str(key)
        if name not in self.known:
            if self.threshold and isinstance(key, int) and not self.compressing:
                # From here on only: parameters are broadcast as they are.
                self.kv.set_gradient_compression({"type": "2bit", "threshold": self.threshold})
                self.compressing = True
            self.known.add(name)
            self.kv.init(name, nd.zeros(array.shape, dtype=array.dtype))
        priority = -key if isinstance(key, int) else 0
        if not self.compressing:
            self.kv.pushpull(name, array, out=array, priority=priority)
        else:  # MXNet: "Compression not supported with PushPull"
            self.kv.push(name, array, priority=priority)
            self.kv.pull(name, out=array, priority=priority)

    def close(self) -> None:
        self.kv.__del__()  # waits for the other workers, and lets the servers go
        self.kv.handle = None

    def abandon(self) -> None:
        """Others may be gone: do not wait for them when this process ends."""
        check_call(_LIB.MXKVStoreSetBarrierBeforeExit(self.kv.handle, 0))


class TrainersStore(kvstore.KVStoreBase):
    """Gradients are summed on this worker's devices first, then over all workers.

    ctx: this worker's devices; workers: a `workers.Workers`."""

    type, rank, num_workers = "workers", 0, 1  # for Trainer, which would otherwise refuse to update by itself

    def __init__(self, ctx: list[Context], workers: Workers) -> None:
        self.workers = workers
        self.inside = shared_memory.Store() if shared_memory.serves(ctx) else mx.kv.create("device")

    def broadcast(self, key: int, value: NDArray, out: list[NDArray], priority: int = 0) -> None:
        self.inside.broadcast(key, value, out, priority)

    def pushpull(self, key: int, value: list[NDArray], out: list[NDArray] | None = None, priority: int = 0) -> None:
        if len(value) > 1:
            self.inside.pushpull(key, value, priority=priority)
        self.workers.allreduce(value[0], key)
        for replica in value[1:]:
            value[0].copyto(replica)

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False  # it runs no optimizer
