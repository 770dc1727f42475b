"""Lesson 5: asynchronous calls, parallel work on all devices, and copies, shown with matrix products.

A call queues an operator in MXNet's engine and returns. Each device has a worker that runs its operators, so a Python
loop over devices keeps all of them busy at once. Each `run_` function prints the same lines as one cell of the source,
the notebook "Multi-GPU training" (Dive into Deep Learning, in PyTorch).
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


def run_asynchronously(x: NDArray, products: int = PRODUCTS) -> float:
    """Run computations on one device asynchronously. Returns the number of seconds until the calls return."""
    with BenchMark(str(x.context)) as until_calls_return:
        _held = run(x, products)  # keep the results, so that freeing them is not timed
    nd.waitall()
    return until_calls_return.seconds


def run_synchronously(x: NDArray, products: int = PRODUCTS) -> float:
    """Run computations on one device synchronously. Returns the number of seconds until the products are done."""
    with BenchMark(str(x.context)) as until_done:
        _held = run(x, products)
        nd.waitall()
    return until_done.seconds


def run_one_after_another(x_devices: Sequence[NDArray], products: int = PRODUCTS) -> float:
    """Run computations on one device after another, waiting for each device. Returns the total time in seconds."""
    with BenchMark("Total time elapsed is") as total:
        for x in x_devices:
            run_synchronously(x, products)
    return total.seconds


def run_at_once(x_devices: Sequence[NDArray], products: int = PRODUCTS) -> float:
    """Run computations on all devices at once: queue all products, then wait once. Returns the time in seconds."""
    with BenchMark("all devices") as all_devices:
        _held = [run(x, products) for x in x_devices]
        nd.waitall()
    return all_devices.seconds


def copy_to_cpu(x: Sequence[NDArray], non_blocking: bool = False) -> list[NDArray]:
    """Copy arrays to host memory. Waits for each copy before queueing the next copy, unless non_blocking is True."""
    copies = []
    for y in x:
        copies.append(y.copyto(mx.cpu()))
        if not non_blocking:
            copies[-1].wait_to_read()
    return copies


def run_then_copy(x: NDArray, products: int = PRODUCTS) -> tuple[float, float]:
    """Compute the products, then copy them to host memory. Returns two times in seconds: for the products and for
    the copies."""
    with BenchMark(f"Run on {x.context}") as on_device:
        y = run(x, products)
        nd.waitall()
    with BenchMark("Copy to CPU") as to_cpu:
        _held = copy_to_cpu(y)
    return on_device.seconds, to_cpu.seconds


def run_and_copy(x: NDArray, products: int = PRODUCTS, non_blocking: bool = True) -> float:
    """Compute the products, and copy each one to host memory as soon as it is done, while the device computes the next
    one. Returns the time in seconds.

    With non_blocking=False, each copy must end before the next copy is queued.
    """
    with BenchMark("Copy to CPU") as to_cpu:
        y = run(x, products)
        _held = copy_to_cpu(y, non_blocking)
        nd.waitall()
    return to_cpu.seconds
