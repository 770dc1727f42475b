"""Shuffles examples, makes batches in host memory, and reads results while later steps are already queued.

Python runs ahead of MXNet's engine: it issues steps in bursts and reads their results later, so it waits once per
burst, not once per step.

Random numbers follow from (seed, worker, step), whatever the process did before.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

# Limits on how far Python runs ahead of the engine. Issuing a burst and then sleeping disturbs MXNet's workers on the
# same cores less than waking up at every step. The limit in seconds also bounds the wait after Ctrl-C.
MOST_STEPS_AHEAD = 16
MOST_SECONDS_AHEAD = 0.4

LARGEST_BATCH = 1024  # maximum number of images evaluated at once

Batch = tuple[NDArray, NDArray]  # (X, y)


def batches(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    order: np.ndarray | None = None,
    part: Callable[[int], np.ndarray] | None = None,
) -> Iterator[Batch]:
    """Yields batches in host memory: X float32 (n, *image_shape), y float32 (n,). The last batch may be smaller.

    images: uint8, which is divided by 255, or float32. labels: class numbers. order: indices of the examples to use, in
    this order; None: all examples, in order.
    part: maps the size of a batch to the indices of the examples that this worker takes, at least one.
    """
    order = np.arange(len(labels)) if order is None else order
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        if part:
            chosen = chosen[part(len(chosen))]
        X, pixels = _empty((len(chosen), *images.shape[1:]))
        y, classes = _empty(chosen.shape)
        np.divide(images[chosen], 255 if images.dtype == np.uint8 else 1, out=pixels, dtype=np.float32)
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


def seed_of_step(seed: int, worker: int, step: int) -> int:
    """The seed for the random numbers of one step in one worker."""
    return int(np.random.SeedSequence([seed, worker, step]).generate_state(1)[0] >> 1)  # MXNet takes 31 bits


def seed_generators(seed: int) -> None:
    """Seed the global generators of MXNet, for all devices, of NumPy and of Python."""
    mx.random.seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def restored_afterward() -> Iterator[None]:
    """Restore the state of NumPy's and Python's generators after the `with` block. MXNet's cannot be read."""
    states = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(states[0])
        random.setstate(states[1])


class DataIter:
    """The batches of an epoch, which can be iterated over once per epoch. See `batches`.

    seed: shuffle the examples, in a new order in each epoch; None: keep their order.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, batch_size: int, seed: int | None = None) -> None:
        self.images, self.labels, self.batch_size, self.seed = images, labels, batch_size, seed
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[NDArray, NDArray]]:
        self.epoch += 1
        order = None if self.seed is None else shuffled(len(self.labels), self.seed, self.epoch)
        return batches(self.images, self.labels, self.batch_size, order)


class Pending:
    """The results of steps that the engine may still be computing, in order.

    Each result is a list of arrays, one vector per shard. Reading waits for the engine, so results are read in bursts.
    """

    def __init__(self) -> None:
        self.steps: deque[list[NDArray]] = deque()
        self.allowed, self.began = 1, time.perf_counter()

    def add(self, shards: list[NDArray]) -> None:
        """Add the results of a step that has just been issued."""
        self.steps.append(shards)

    def ready(self) -> Iterator[np.ndarray]:
        """Yield the oldest results, each as one vector (n,), if enough steps have been issued to read a burst."""
        if len(self.steps) < self.allowed:
            return
        burst = len(self.steps) - self.allowed // 8  # the remaining steps keep the engine busy during the next burst
        for _ in range(burst):
            yield _joined(self.steps.popleft())
        now = time.perf_counter()
        self.allowed = int(np.clip(MOST_SECONDS_AHEAD * burst / (now - self.began), 1, MOST_STEPS_AHEAD))
        self.began = now

    def rest(self) -> Iterator[np.ndarray]:
        """Yield all remaining results."""
        while self.steps:
            yield _joined(self.steps.popleft())


def _joined(shards: list[NDArray]) -> np.ndarray:
    return np.concatenate([shard.asnumpy() for shard in shards])
