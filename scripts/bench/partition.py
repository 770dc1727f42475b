"""Compare three ways to split LeNet across two devices. Shows times, bytes moved and idle times."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

from bench import harness
from bench.harness import LR, Job
from bench.steps import timed
from gluon_mgpu.runtime import engine, log
from gluon_mgpu.training import timeline

SIZE = harness.BATCH_SIZE["lenet"]
RECORDED_STEPS = 20

PARAMETERS = 200 + 25050 + 102528 + 1290  # LeNet's parameters, layer by layer
ACTIVATIONS = (20 * 13 * 13, 50 * 4 * 4, 128, 10)  # number of outputs of each layer, per example

WAYS: dict[str, dict[str, Any]] = {  # {name: arguments of `work`}
    "one device, one thread": {"way": "data parallelism", "contexts": 1},
    "network partitioning": {"way": "network partitioning"},
    "network partitioning, 4 micro-batches": {"way": "network partitioning", "micro_batches": 4},
    "layer-wise partitioning": {"way": "layer-wise partitioning"},
    "data parallelism": {"way": "data parallelism"},
}


def run(rounds: int = 3, steps: int = 100) -> dict:
    """Measure WAYS in turn. Returns the input of `table`. steps: number of timed steps per run."""
    env = harness.environment(harness.ONE_THREAD)  # otherwise, a single context would use more threads
    jobs = {name: Job("partition", {**arguments, "steps": steps}, env) for name, arguments in WAYS.items()}
    return {"rounds": rounds, "ways": harness.measure(jobs, rounds)}


def bytes_moved(way: str, devices: int, n: int) -> int:
    """The bytes that a step on n examples copies between devices, as float32. tests/bench/test_bench.py
    compares this with the bytes that are copied."""
    others = devices - 1
    if way == "data parallelism":  # all other devices send gradients to the first and receive the sums
        return 4 * 2 * others * PARAMETERS
    if way == "network partitioning":  # each cut sends activations forward and their gradients back
        return 4 * 2 * n * sum(ACTIVATIONS[:others])
    # Each device sends its outputs to every other device and gets their gradients back. Scores are sent
    # only to the first device, which computes 10 / devices of the scores itself, rounded up.
    scores = 10 - -(-10 // devices)
    return 4 * 2 * n * (others * sum(ACTIVATIONS[:-1]) + scores)


def table(result: dict) -> str:
    """Format ms and MB per step of each way, and the idle share of each device."""
    rows = [["", "ms/step", "MB between devices", "% idle, by device"]]
    for name, run in result["ways"].items():
        idle = " ".join(f"{100 * median(shares):3.0f}" for shares in zip(*run["idle"]))
        rows.append([name, harness.spread(run["step_ms"], 1), f"{run['bytes_moved'][0] / 1e6:.3f}", idle])
    title = f"LeNet on several devices, training, batch {SIZE}, one thread per device, medians of"
    return "\n".join([f"{title} {result['rounds']} rounds (min-max);", harness.machine_line(), *log.table(rows)])


def work(way: str, steps: int, contexts: int = 2, micro_batches: int = 1) -> dict[str, Any]:
    """Measure one of gluon_mgpu.partition.WAYS on CPU contexts: time, bytes that a step moves between devices, and each
    device's idle share, which comes from additional steps with the engine's profiler."""
    engine.configure(contexts)
    import mxnet as mx

    from gluon_mgpu import partition, scratch

    ctx = [mx.cpu(i) for i in range(contexts)]
    place, train_batch = partition.WAYS[way]
    options = {"micro_batches": micro_batches} if micro_batches > 1 else {}
    step = partial(train_batch, device_params=place(scratch.init_params(), ctx), ctx=ctx, lr=LR["lenet"], **options)
    times = harness.time_steps(timed(step, SIZE), "lenet", SIZE, steps)
    found = timeline.summary(harness.record(step, ctx, SIZE, RECORDED_STEPS, way))["contexts"]
    idle = [device["idle_share"] for device in found.values()]
    return {**times, "idle": idle, "bytes_moved": bytes_moved(way, contexts, SIZE)}
