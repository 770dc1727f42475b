"""Lesson 5: asynchronous calls, parallel work on all devices, and copies, shown with matrix products.

A call queues an operator in MXNet's engine and returns. Each device has a worker that runs its operators, so a Python
loop over devices keeps all of them busy at once. docs/asynchrony.md times these functions as the source does, the
notebook "Multi-GPU training" (Dive into Deep Learning, in PyTorch).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import mxnet as mx
from mxnet import Context, nd
from mxnet.ndarray import NDArray

SIZE, PRODUCTS = 4000, 50  # as in the notebook


def matrices(ctx: Sequence[Context], size: int = SIZE) -> list[NDArray]:
    """Create one random matrix (size, size) per device, and wait for all of them."""
    x_devices = [nd.random.uniform(shape=(size, size), ctx=c) for c in ctx]
    nd.waitall()
    return x_devices


def run(x: NDArray, products: int = PRODUCTS) -> list[NDArray]:
    """Queue the product of a matrix (n, n) with itself, `products` times, on its device. Returns without waiting.

    If two devices run only one after the other, MXNET_CPU_TEMP_COPY may be too small (docs/performance.md).
    """
    return [nd.dot(x, x) for _ in range(products)]


def copy_to_cpu(x: Sequence[NDArray], non_blocking: bool = False) -> list[NDArray]:
    """Copy arrays to host memory.

    non_blocking: queue all copies, and return without waiting. Otherwise, wait for each copy before the next is queued.
    """
    copies = []
    for y in x:
        copy = y.copyto(mx.cpu())
        if not non_blocking:
            copy.wait_to_read()
        copies.append(copy)
    return copies


class BenchMark:
    """Times a `with` block. At its end, prints `name` and the time in seconds, and stores the time in `seconds`.

    The time is that of the Python code: to measure the devices' work, end the block with `nd.waitall()`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> BenchMark:
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.start
        print(self.name, self.seconds)
