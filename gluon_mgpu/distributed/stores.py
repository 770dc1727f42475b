"""Sums arrays over the workers of a run, with Horovod or MXNet's parameter servers."""

from __future__ import annotations

import os

import mxnet as mx
from mxnet import nd
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

from gluon_mgpu.runtime.errors import Error

FUSION_BYTES = 4 << 20  # smaller arrays are copied and summed together; larger arrays are summed in place


class Horovod:
    """Sums arrays with Horovod 0.28.1, in a ring of workers.

    Raises Error if Horovod is not installed for this MXNet.
    """

    def __init__(self, compress: str | None, workers: int) -> None:
        try:
            import horovod.mxnet as hvd
        except (ImportError, OSError) as error:  # OSError: Horovod was built for a different MXNet
            raise Error(f"Horovod is not installed for this MXNet ({error}): run `make horovod`") from None
        self.hvd, self.compress = hvd, compress
        # Which arrays are fused depends on timing, and with more than 2 workers, so does the order of additions.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(FUSION_BYTES if workers == 2 else 0))
        hvd.init()

    def allreduce(self, array: NDArray, key: int | str) -> None:
        """Sum an array over all workers, in place. key: an int for a gradient, a str for any other array."""
        is_gradient = isinstance(key, int)
        sent = array
        if array.context.device_type == "gpu":  # `make horovod` builds Horovod without CUDA support
            sent = array.as_in_context(mx.cpu())
        if self.compress and is_gradient:
            sent = sent.astype("float16")
        self.hvd.allreduce_(sent, average=False, name=str(key), priority=-int(key) if is_gradient else 0)
        if sent is not array:
            sent.astype(array.dtype).copyto(array)

    def from_worker_0(self, text: str) -> str:
        """Send worker 0's text, at most 256 ASCII characters, to all workers."""
        sent = nd.array(list(text.encode().ljust(256)), dtype="int32")
        return bytes(self.hvd.broadcast(sent, root_rank=0, name="address").asnumpy().astype("uint8")).decode().strip()

    def close(self) -> None:
        self.hvd.shutdown()


class DistSync:
    """Sums arrays with MXNet's parameter servers (ps-lite). Servers only sum: each sums its own part of the arrays.

    threshold: the threshold for 2-bit compression of gradients; None: no compression.
    """

    def __init__(self, threshold: float | None) -> None:
        self.kv = mx.kv.create("dist_sync")
        # At the end, the heartbeat waits for the other workers. In ps-lite's own barrier, processes can hang.
        check_call(_LIB.MXKVStoreSetBarrierBeforeExit(self.kv.handle, 0))
        self.threshold, self.compressing = threshold, False
        self.keys: set[str] = set()

    def allreduce(self, array: NDArray, key: int | str) -> None:
        """Sum an array over all workers, in place. key: an int for a gradient, a str for any other array."""
        is_gradient = isinstance(key, int)
        name, priority = str(key), -int(key) if is_gradient else 0
        if name not in self.keys:
            if self.threshold and is_gradient and not self.compressing:
                # Compression is not enabled earlier, because it would also apply to the parameters from worker 0.
                self.kv.set_gradient_compression({"type": "2bit", "threshold": self.threshold})
                self.compressing = True
            self.keys.add(name)
            self.kv.init(name, nd.zeros(array.shape, dtype=array.dtype))
        if self.compressing:  # pushpull does not support compression
            self.kv.push(name, array, priority=priority)
            self.kv.pull(name, out=array, priority=priority)
        else:
            self.kv.pushpull(name, array, out=array, priority=priority)

    def close(self) -> None:
        self.kv.__del__()
        self.kv.handle = None
