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


def run(x: NDArray, products: int = PRODUCTS) -> list[NDArray]:
    """Compute the product of a matrix (n, n) with itself, `products` times, on its device. Returns without waiting.

    All CPU contexts share MXNET_CPU_TEMP_COPY temporary spaces, and each nd.dot takes one of them. If the queued
    products need more spaces than that, contexts wait for each other (docs/performance.md).
    """
    return [nd.dot(x, x) for _ in range(products)]


class BenchMark:
    """Times a `with` block. Prints the block's name and time in seconds, and stores the time in `seconds`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> BenchMark:
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.start
        print(self.name, self.seconds)


def matrices(ctx: Sequence[Context], size: int = SIZE) -> list[NDArray]:
    """Create one random matrix (size, size) per device, and wait for all of them."""
    x_devices = [nd.random.uniform(shape=(size, size), ctx=c) for c in ctx]
    nd.waitall()
    return x_devices


def copy_to_cpu(x: Sequence[NDArray], non_blocking: bool = False) -> list[NDArray]:
    """Copy arrays to host memory. Waits for each copy before queueing the next copy, unless non_blocking is True."""
    copies = []
    for y in x:
        copies.append(y.copyto(mx.cpu()))
        if not non_blocking:
            copies[-1].wait_to_read()
    return copies
