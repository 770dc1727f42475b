"""Shuffles examples, and makes batches of them in host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

from gluon_mgpu.support.errors import check_whole

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
    Raises UsageError if batch_size is not a positive whole number.
    """
    check_whole("batch_size", batch_size, 1)
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
