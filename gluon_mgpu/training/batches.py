"""Makes batches in host memory, and reads results while later steps are already queued.

Python runs ahead of MXNet's engine: it issues steps in bursts and reads their results later, so it waits once per
burst, not once per step.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Optional

import mxnet as mx
import numpy as np
from mxnet import Context, nd
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

from gluon_mgpu.runtime.devices import shard_sizes

# Limits on how far Python runs ahead of the engine. Issuing a burst and then sleeping disturbs MXNet's workers on the
# same cores less than waking up at every step (docs/engine.md). The limit in seconds also bounds the wait after Ctrl-C.
MOST_STEPS_AHEAD = 16
MOST_SECONDS_AHEAD = 0.4

Batch = tuple[Optional[NDArray], Optional[NDArray]]  # (X, y), or (None, None) if this worker has no examples


def batches(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    order: np.ndarray | None = None,
    part: Callable[[int], slice] | None = None,
) -> Iterator[Batch]:
    """Yields batches in host memory: X float32 (n, 1, 28, 28) in [0, 1], y float32 (n,). The last batch may be smaller.

    images, labels: uint8 arrays. order: indices of the examples to use, in this order; None: all examples, in order.
    part: maps the size of a batch to the slice that this worker takes; if the slice is empty, yields (None, None).
    """
    order = np.arange(len(labels)) if order is None else order
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        if part:
            chosen = chosen[part(len(chosen))]
        if not len(chosen):
            yield None, None
            continue
        X, pixels = _empty((len(chosen), *images.shape[1:]))
        y, classes = _empty(chosen.shape)
        np.divide(images[chosen], 255, out=pixels, dtype=np.float32)
        classes[:] = labels[chosen]
        yield X, y


def _empty(shape: tuple[int, ...]) -> tuple[NDArray, np.ndarray]:
    """Returns a new float32 NDArray in host memory, and a NumPy view that the caller fills before using the NDArray.

    nd.array would first wait for everything queued on cpu(0). nd.from_numpy would release the memory by calling Python
    from an engine thread; in a process that is about to exit, this call can abort the process.
    """
    array, memory = nd.empty(shape, mx.cpu()), ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(memory)))
    return array, np.ctypeslib.as_array(ctypes.cast(memory, ctypes.POINTER(ctypes.c_float)), shape)


def shuffled(examples: int, seed: int, epoch: int) -> np.ndarray:
    """A random order of the examples for one epoch, as indices (examples,)."""
    return np.random.default_rng([seed, epoch]).permutation(examples)


def split_batch(X: NDArray, y: NDArray, parts: int) -> Iterator[tuple[NDArray, NDArray]]:
    """Split a batch in host memory into up to `parts` parts of nearly equal size. Yields (X, y) for each part."""
    start = 0
    for size in shard_sizes(X.shape[0], min(parts, X.shape[0])):
        yield X[start : start + size], y[start : start + size]
        start += size


def split_by_shares(data: NDArray, ctx: list[Context], shares: tuple[float, ...]) -> list[NDArray]:
    """Split a batch into one shard per device, in proportion to shares. Empty shards are omitted."""
    shards, start = [], 0
    for size, c in zip(shard_sizes(data.shape[0], len(ctx), shares), ctx):
        if size:
            shards.append(data[start : start + size].as_in_context(c))
        start += size
    return shards


def read_behind(issued: Iterable[list[NDArray]]) -> Iterator[np.ndarray]:
    """Yields each step's results as one NumPy vector (n,), in order, while later steps are already queued.

    issued: advancing this iterator issues the next step and yields the step's results, one vector per shard.
    """
    ahead: deque[list[NDArray]] = deque()
    allowed, began = 1, time.perf_counter()
    for shards in issued:
        ahead.append(shards)
        if len(ahead) >= allowed:
            burst = len(ahead) - allowed // 8  # the remaining steps keep the engine busy while the next burst is issued
            for _ in range(burst):
                yield _joined(ahead.popleft())
            now = time.perf_counter()
            allowed = int(np.clip(MOST_SECONDS_AHEAD * burst / (now - began), 1, MOST_STEPS_AHEAD))
            began = now
    for shards in ahead:
        yield _joined(shards)


def mean(issued: Iterable[list[NDArray]]) -> float:
    """Compute the mean of all results of the steps in `issued` (see `read_behind`)."""
    return float(np.concatenate(list(read_behind(issued))).mean(dtype=np.float64))


def _joined(shards: list[NDArray]) -> np.ndarray:
    return np.concatenate([shard.asnumpy() for shard in shards] or [np.empty(0, np.float32)])
