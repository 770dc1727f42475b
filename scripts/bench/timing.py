"""How a point is timed, with MXNet and with PyTorch: the data, the parameters, and the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from bench.grids import BATCH_SIZE, Point
from gluon_mgpu.data import datasets
from gluon_mgpu.data.datasets import Dataset

WARM_UP_STEPS = {"lenet": 10, "resnet18": 2}
STEP_SHARE = {"lenet": 1.0, "resnet18": 0.1}  # multiplies --steps; ResNet-18 computes about 80 times as much per step
LR = {"lenet": 0.2, "resnet18": 0.025}  # as in the recipes, which use 0.1 for ResNet-18 with a batch of 256
WARM_UP_CALLS = 5  # cuDNN tries its algorithms

Call = Callable[[], Any]
# Trains on the examples with these indices, in this order; returns the mean loss (None if unknown) and the seconds.
Train = Callable[[Dataset, np.ndarray], tuple[Any, float]]


def initial(parameters: dict[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """Draw all weights from normal(0, 0.01), the same for every implementation; keep biases and the arrays of batch
    normalization unchanged. parameters: {name: NumPy array}, in the order of the layers."""
    rng = np.random.default_rng(0)
    return {
        name: 0.01 * rng.standard_normal(p.shape, np.float32) if p.ndim > 1 else p for name, p in parameters.items()
    }


def take_turns(pipe: str, results: Iterator[dict[str, Any] | None]) -> None:
    """For each byte in a named pipe, take the next result and print it as a line of JSON, unless it is None.

    With several workers, each calls this, and only the first has results.
    """
    with open(pipe, "rb", buffering=0) as turns:
        while turns.read(1):
            result = next(results)
            if result is not None:
                print(json.dumps(result), flush=True)


def steps_of(train: Train, point: Point, steps: int) -> Iterator[dict[str, Any]]:
    """Time training on synthetic data, again and again, after a warm-up. Yields ms per step, the mean loss of the
    first steps after the warm-up, and the peak memory.

    A step includes making the batch from uint8 images, the computation, and reading the losses. steps: of LeNet with
    256 examples; adjusted for other models and batch sizes.
    """
    size, model = point.batch_size, point.model
    steps = max(3, round(steps * STEP_SHARE[model] * BATCH_SIZE[model] / size))
    data = datasets.synthetic(max(steps, WARM_UP_STEPS[model]) * size, 100, seed=0)
    train(data, np.arange(WARM_UP_STEPS[model] * size))
    order = np.random.default_rng(0).permutation(steps * size)
    first: float | None = None
    while True:
        loss, seconds = train(data, order)
        first = loss if first is None else first
        yield {"step_ms": 1000 * seconds / steps, "loss": first, "peak MB": peak_mb()}


def peak_mb() -> float:
    """This process's peak memory in MB. getrusage would include the peak of the process that started it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) * 1024 / 1e6


def calls_of(call: Call, wait: Call, count: int) -> Iterator[dict[str, float]]:
    """Time calls, again and again, after a warm-up. returns ms: until a call returns, if nothing is queued. done ms:
    until it is done. step_ms: per call, if `count` calls are queued and only the last one is waited for."""
    for _ in range(WARM_UP_CALLS):
        call()
    wait()
    while True:
        returned, done = [], []
        for _ in range(count):
            start = time.perf_counter()
            held = call()
            returned.append(time.perf_counter() - start)
            wait()
            done.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(count):
            held = call()
        wait()
        each = (time.perf_counter() - start) / count
        del held
        yield {"step_ms": 1e3 * each, "returns ms": 1e3 * median(returned), "done ms": 1e3 * median(done)}
