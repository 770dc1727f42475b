"""Compare three ways to split LeNet across two devices. Shows times, bytes moved and idle times."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import harness, timeline
from bench.harness import LR, Job, Step
from gluon_mgpu.compat import startup
from gluon_mgpu.support import log

SIZE = harness.BATCH_SIZE["lenet"]
RECORDED_STEPS = 20
WAYS: dict[str, dict[str, Any]] = {  # {name: arguments of `work`}
    "one device, one thread": {"way": "data parallelism", "contexts": 1},
    "network partitioning": {"way": "network partitioning"},
    "network partitioning, 4 micro-batches": {"way": "network partitioning", "micro_batches": 4},
    "layer-wise partitioning": {"way": "layer-wise partitioning"},
    "data parallelism": {"way": "data parallelism"},
}


def run(rounds: int, steps: int) -> dict:
    """Measure WAYS in turn. Returns the input of `table`. steps: number of timed steps per run."""
    env = harness.environment(harness.ONE_THREAD)  # otherwise, a single context would use more threads
    jobs = {name: Job("partition", {**arguments, "steps": steps}, env) for name, arguments in WAYS.items()}
    return {"rounds": rounds, "ways": harness.measure(jobs, rounds)}


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
    startup.configure(contexts)
    import mxnet as mx

    from gluon_mgpu import partition, scratch

    ctx = [mx.cpu(i) for i in range(contexts)]
    place, train_batch = partition.WAYS[way]
    options = {"micro_batches": micro_batches} if micro_batches > 1 else {}
    device_params = place(scratch.init_params(), ctx)

    def step(X: Any, y: Any, lr: float) -> list:
        return train_batch(X, y, device_params, ctx, lr, **options)

    times = harness.time_steps(harness.timed(step, LR["lenet"], SIZE), "lenet", SIZE, steps)
    recorded = timeline.record(step, LR["lenet"], contexts, SIZE, RECORDED_STEPS)
    idle = [1 - sum(timeline.busy(recorded, i).values()) for i in range(contexts)]
    return {**times, "idle": idle, "bytes_moved": bytes_moved(step, SIZE)}


def bytes_moved(step: Step, n: int) -> int:
    """The bytes that a step on n examples copies from one device to another. The batch comes from a context that does
    not train, and does not count."""
    import mxnet as mx

    host, copyto, sizes = mx.cpu(9), mx.nd.NDArray.copyto, []

    def counted(array: Any, other: Any) -> Any:
        destination = other if isinstance(other, mx.Context) else other.context
        if array.context not in (destination, host):
            sizes.append(array.size * array.dtype().itemsize)
        return copyto(array, other)

    mx.nd.NDArray.copyto = counted
    try:
        step(mx.nd.ones((n, 1, 28, 28), ctx=host), mx.nd.ones(n, ctx=host), 0.1)
    finally:
        mx.nd.NDArray.copyto = copyto
    return sum(sizes)
