"""Compare the speed of each operator in a step, in FLOP/s and bytes/s, with what one core can sustain.

With DNNL_VERBOSE=1, oneDNN prints a line for each operator that it runs. In the roofline model, an operator takes at
least FLOP / FLOP/s and at least bytes / bytes/s (Williams, Waterman, Patterson: Roofline, 2009). The FLOP/s and the
bytes/s that a core sustains are measured in the same process.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, LR, TITLE, Job
from gluon_mgpu.runtime import log

ROUNDS = 3  # the fastest round counts, because other programs can only slow a round down
SHOWN = 0.01  # operators that take a smaller share of a step's time have no row of their own
FLOAT = 4  # bytes per float32 number
GRADIENTS = {"backward_data": "data gradient", "backward_weights": "weight gradient"}


class Operator(NamedTuple):
    """One line of oneDNN's output: an operator, its work and its time."""

    name: str
    flop: float  # multiplications and additions; counted only for convolutions and dense layers
    bytes: float  # size of the inputs and outputs, each counted once
    ms: float


def parse(line: str) -> Operator | None:
    """Parse a line that oneDNN may have printed. Returns None if the line does not describe an operator."""
    if not line.startswith("dnnl_verbose,exec,"):
        return None
    _, _, _, kind, _, way, *_, problem, ms = line.split(",")
    kind = kind.removesuffix("_v2")
    size = {name: int(value) for name, value in re.findall(r"(mb|[iok][chw]|g)(\d+)", problem)}
    n, ic, oc, groups = (size.get(name, 1) for name in ("mb", "ic", "oc", "g"))
    inputs, outputs, kernel = (size.get(f"{array}h", 1) * size.get(f"{array}w", 1) for array in "iok")
    if kind in ("convolution", "inner_product"):
        weights = ic * oc * kernel // groups
        elements = n * (ic * inputs + oc * outputs) + weights
        shape = f" {size['kh']}x{size['kw']}" if "kh" in size else ""
        name = f"{kind.replace('inner_product', 'dense')}{shape}, {ic} to {oc}, {GRADIENTS.get(way, 'forward')}"
        return Operator(name, 2 * n * outputs * weights, FLOAT * elements, float(ms))
    way = way.partition("_")[0].replace("undef", "")  # "forward", "backward" or ""
    if kind == "pooling":
        elements = n * ic * (inputs + outputs)
    else:
        shapes = [prod(size.values())] if size else [prod(map(int, s.split("x"))) for s in problem.split(":")]
        arrays = 3 if way == "backward" or kind in ("sum", "binary") else 2  # read or written, of the input's size
        elements = arrays * sum(shapes)
    return Operator(", ".join(filter(None, [kind.replace("_", " "), way])), 0, FLOAT * elements, float(ms))


def run(model: Sequence[str] = tuple(TITLE), steps: int = 100) -> dict[str, Any]:
    """Measure one context with one OpenMP thread, on half the default batch, as if 2 contexts shared the batch. Returns
    the input of `table`. steps: number of steps of LeNet."""
    jobs = {name: Job("roofline", {"model": name, "steps": steps}, _environment()) for name in model}
    return {"models": {name: harness.start(TITLE[name], job) for name, job in jobs.items()}}


def _environment() -> dict[str, str]:
    return harness.environment({**harness.ONE_THREAD, "DNNL_VERBOSE": "1"})


def table(result: dict) -> str:
    """Format, for each model, the operators that take at least SHOWN of a step's time."""
    lines = [
        f"One context, one thread, highlevel; {harness.machine_line()}",
        "x limit: time / max(FLOP / FLOP/s, bytes / bytes/s); can be below 1 if the data is in a cache.",
    ]
    for name, found in result["models"].items():
        flops, bandwidth, step = found["flops"], found["bytes_per_s"], found["step_ms"]
        lines += [
            "",
            f"{TITLE[name]}, {found['examples']} examples: {step:.2f} ms per step",
            f"a core sustains {flops / 1e9:.0f} GFLOP/s in a convolution from 64 to 64 channels, and copies "
            f"{bandwidth / 1e9:.1f} GB/s in memory",
        ]
        rows: list[list[str]] = [["operator", "ms", "% of step", "MFLOP", "GFLOP/s", "MB", "GB/s", "x limit"]]
        shown = [row for row in found["operators"] if row["ms"] >= SHOWN * step]
        for row in sorted(shown, key=lambda row: -row["ms"]):
            limit = 1000 * max(row["flop"] / flops, row["bytes"] / bandwidth)
            work = [f"{row['flop'] / 1e6:.0f}", f"{row['flop'] / row['ms'] / 1e6:.0f}"] if row["flop"] else ["", ""]
            moved = [f"{row['bytes'] / 1e6:.1f}", f"{row['bytes'] / row['ms'] / 1e6:.1f}"]
            share = f"{100 * row['ms'] / step:.1f}"
            rows.append([row["name"], f"{row['ms']:.2f}", share, *work, *moved, f"{row['ms'] / limit:.1f}"])
        small = sum(row["ms"] for row in found["operators"]) - sum(row["ms"] for row in shown)
        outside = step - sum(row["ms"] for row in found["operators"])
        for title, ms in (("smaller operators", small), ("outside oneDNN: MXNet's own operators, Python", outside)):
            rows.append([title, f"{ms:.2f}", f"{100 * ms / step:.1f}"])
        lines += log.table(rows)
    return "\n".join(lines)


# In a worker


def work(model: str, steps: int) -> dict[str, Any]:
    examples = BATCH_SIZE[model] // 2
    made = harness.replicas("highlevel", model, 1, size=examples)
    import mxnet as mx
    from mxnet import nd

    X, y = mx.random.uniform(shape=(examples, 1, 28, 28)), nd.zeros(examples)
    x, kernel = nd.ones((32, 64, 28, 28)), nd.ones((64, 64, 3, 3))
    convolve = partial(nd.Convolution, x, kernel, kernel=(3, 3), pad=(1, 1), num_filter=64, no_bias=True)

    def train() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            made.train_batch(X, y, LR[model])
        nd.waitall()
        return 1000 * (time.perf_counter() - start) / steps

    steps = max(3, round(steps * harness.STEP_SHARE[model]))
    train()
    found, step_ms = min((_operators(train) for _ in range(ROUNDS)), key=lambda result: result[1])
    flops = max(op.flop / op.ms for _ in range(10) for op in _operators(lambda: convolve().wait_to_read())[0]) * 1000
    sustained = {"flops": flops, "bytes_per_s": _copied()}
    return {"examples": examples, "step_ms": step_ms, "operators": _by_name(found, steps), **sustained}


def _operators(work: Callable[[], Any]) -> tuple[list[Operator], Any]:
    """Run `work`. Returns (the operators that oneDNN printed, the result). oneDNN does not print through Python."""
    out = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            result = work()
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(out, 1)
            os.close(out)
        file.seek(0)
        found = [parse(line) for line in file.read().decode().splitlines()]
    return [operator for operator in found if operator], result


def _by_name(found: list[Operator], steps: int) -> list[dict[str, Any]]:
    """Add up operators with the same name. Returns averages per step."""
    totals: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(3))
    for name, *work in found:
        totals[name] += work
    return [Operator(name, *(total / steps).tolist())._asdict() for name, total in totals.items()]


def _copied() -> float:
    """The bytes per second that are read and written while NumPy copies a large array."""
    a, b = np.ones(128 << 20, np.uint8), np.ones(128 << 20, np.uint8)
    return 2 * a.nbytes / min(timeit.repeat(lambda: np.copyto(b, a), number=1, repeat=15))
