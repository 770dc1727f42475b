"""The three ways to split LeNet over two devices: what each costs in time, in bytes moved and in devices that wait.

A worker, `python -m bench.partition time SUBJECT STEPS`, works on synthetic data; its subject and its result
are JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tqdm import tqdm

from bench import machine, own_process
from gluon_mgpu.runtime import engine
from gluon_mgpu.training import datasets

if TYPE_CHECKING:
    from mxnet import Context
    from mxnet.ndarray import NDArray

BATCH_SIZE = 256
WARM_UP_STEPS = 10
PROFILED_STEPS = 20
LR = 0.2


class Subject(NamedTuple):
    """One thing to measure: a way of partition.WAYS on so many CPU contexts."""

    way: str
    contexts: int = 2
    micro_batches: int = 1

    def __str__(self) -> str:
        if self.contexts == 1:
            return "one device, one thread"
        return self.way + (f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")


SUBJECTS = (
    Subject("data parallelism", contexts=1),
    Subject("network partitioning"),
    Subject("network partitioning", micro_batches=4),
    Subject("layer-wise partitioning"),
    Subject("data parallelism"),
)


def run(rounds: int = 3, steps: int = 100) -> dict:
    """Measure SUBJECTS in turn, each time in processes of their own; returns what `table` and `draw` show.

    rounds: runs of each subject. steps: timed steps a run. Of each subject the result has "step_ms", one a run;
    "bytes_between_devices" and "bytes_from_host" of one step, as `counted_copies` counts them; and "idle", a share of
    each device, one a run, as `idle_shares` finds it in a run apart, with the engine's profiler. The batch is counted
    as where devices are GPUs, from the host to each; in the timed runs it lies on cpu(0), as in training, and only the
    other device gets a copy. Raises Error for a run that fails.
    """
    found: dict[Subject, dict] = {subject: {"step_ms": [], "idle": []} for subject in SUBJECTS}
    with tqdm(total=rounds * len(SUBJECTS), unit="run", leave=False, disable=not sys.stderr.isatty()) as bar:
        for _ in range(rounds):
            for subject in SUBJECTS:
                bar.set_description(str(subject))
                found[subject]["step_ms"].append(_in_own_process("time", subject, steps))
                found[subject]["idle"].append(_in_own_process("profile", subject, PROFILED_STEPS))
                bar.update()
    for subject in SUBJECTS:
        found[subject].update(_in_own_process("count", subject, 1))
    ways = [{"name": str(subject), "devices": subject.contexts, **found[subject]} for subject in SUBJECTS]
    return {"batch_size": BATCH_SIZE, "rounds": rounds, "steps": steps, "ways": ways}


def table(result: dict) -> str:
    """Lines for a terminal: each way's milliseconds a step, megabytes a step, and idle share of each device."""
    lines = [
        f"LeNet split over devices, train, batch {result['batch_size']}, one thread a device, medians of "
        f"{result['rounds']} runs; {machine.line()}",
        f"{'':38}ms/step     (min-max)  MB between devices  MB from host  % idle, by device",
    ]
    for way in result["ways"]:
        times = way["step_ms"]
        idle = " ".join(f"{100 * median(shares):3.0f}" for shares in zip(*way["idle"]))
        lines.append(
            f"{way['name']:38}{median(times):7.1f} {f'({min(times):.1f}-{max(times):.1f})':>13}"
            f"{way['bytes_between_devices'] / 1e6:20.3f}{way['bytes_from_host'] / 1e6:14.3f}  {idle}"
        )
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """Bars of the time of a step and of the bytes that it moves, as a PNG picture. file: binary and open, or a path."""
    from matplotlib.figure import Figure

    ways = result["ways"]
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    figure.suptitle(f"LeNet split over devices, a training step of {result['batch_size']} examples", fontsize="medium")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    names = [way["name"].replace(", ", ",\n") for way in ways]
    times = [median(way["step_ms"]) for way in ways]
    spread = [
        [t - min(way["step_ms"]) for t, way in zip(times, ways)],
        [max(way["step_ms"]) - t for t, way in zip(times, ways)],
    ]
    colors = ["0.6"] + ["tab:blue"] * (len(ways) - 1)
    by_time.barh(names, times, xerr=spread, color=colors, capsize=3)
    by_time.set(xlabel="milliseconds: median, least and most")
    between, from_host = ([way[key] / 1e6 for way in ways] for key in ("bytes_between_devices", "bytes_from_host"))
    by_bytes.barh(names, between, color="tab:orange", label="between devices")
    by_bytes.barh(names, from_host, left=between, color="0.85", label="the batch, from the host")
    by_bytes.set(xlabel="megabytes copied")
    by_bytes.legend(frameon=False, fontsize="small")
    by_time.invert_yaxis()
    for axes in (by_time, by_bytes):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(file, format="png", dpi=120)


@contextmanager
def counted_copies() -> Iterator[list[tuple[Context, Context, int]]]:
    """Gives a list that grows by (source, destination, bytes) with each copy from one context to another.

    All copies of NDArrays go through `NDArray.copyto`; `as_in_context` calls it where the contexts differ. What
    `backward` copies by itself, of copies that were recorded, is not seen here.
    """
    from mxnet import nd
    from mxnet.context import Context

    copies, copyto = [], nd.NDArray.copyto

    def counting(array: NDArray, other: NDArray | Context) -> NDArray:
        destination = other if isinstance(other, Context) else other.context
        if destination != array.context:
            copies.append((array.context, destination, array.size * array.dtype().itemsize))
        return copyto(array, other)

    nd.NDArray.copyto = counting
    try:
        yield copies
    finally:
        nd.NDArray.copyto = copyto


def idle_shares(events: list[dict], devices: int) -> list[float]:
    """The share of the time that each of cpu(0), cpu(1), ... had nothing to do.

    events: the "traceEvents" that mx.profiler dumped. cpu(i) is Chrome's process i there, whatever name is given to it:
    MXNet names as many as there are cores. Its worker writes a begin ("B") and an end ("E") around each operator, or
    bulk of operators, that it executes; a copy counts for the context that it copies from. Idle is what no operator
    covers, of the time from the first begin to the last end on any of the devices. An operator that waits for a core
    counts as busy.
    """
    spans: list[list[tuple[float, float]]] = [[] for _ in range(devices)]
    began: dict[tuple, float] = {}
    for event in events:
        worker = (event["pid"], event.get("tid"))
        if event["pid"] < devices and event["ph"] == "B":
            began[worker] = event["ts"]
        elif event["pid"] < devices and event["ph"] == "E":
            spans[event["pid"]].append((began.pop(worker), event["ts"]))
    start = min(begin for device in spans for begin, _ in device)
    end = max(end for device in spans for _, end in device)
    return [1 - _covered(device) / (end - start) for device in spans]


def _covered(spans: list[tuple[float, float]]) -> float:
    """How long at least one of the spans (begin, end) lasts."""
    covered = until = 0.0
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered


def _in_own_process(mode: str, subject: Subject, steps: int) -> Any:
    given = mode, json.dumps(subject._asdict()), steps
    one_thread = (("OMP_NUM_THREADS", "1"),)  # also where one context could have more
    return own_process.last(str(subject), "bench.partition", *given, settings=one_thread)


def _worker(mode: str, subject: Subject, steps: int) -> None:
    engine.configure(subject.contexts)
    import mxnet as mx

    from gluon_mgpu import partition, scratch
    from gluon_mgpu.training import loop

    ctx = [mx.cpu(i) for i in range(subject.contexts)]
    engine.check(ctx)
    options = {"micro_batches": subject.micro_batches} if subject.micro_batches > 1 else {}
    spread, step = partition.WAYS[subject.way]
    mx.random.seed(0)
    device_params = spread(scratch.init_params(), ctx, **options)
    train_batch = partial(step, device_params=device_params, ctx=ctx, lr=LR, **options)
    data = datasets.synthetic(max(steps, WARM_UP_STEPS) * BATCH_SIZE, 100, seed=0)

    def work(steps: int) -> float:
        examples = steps * BATCH_SIZE
        data_iter = loop.batches(data.train_images[:examples], data.train_labels[:examples], BATCH_SIZE)
        start = time.perf_counter()
        loop.train_epoch(train_batch, data_iter, examples, str(subject))
        return time.perf_counter() - start

    if mode == "count":
        host = mx.cpu(subject.contexts)  # a batch on no device, as it is where the devices are GPUs
        X, y = next(loop.batches(data.train_images, data.train_labels, BATCH_SIZE))
        X, y = X.copyto(host), y.copyto(host)
        with counted_copies() as copies:
            train_batch(X, y)
        mx.nd.waitall()
        print(json.dumps(_sums(copies, host)))
        return
    work(WARM_UP_STEPS)
    if mode == "time":
        print(json.dumps(work(steps) / steps * 1000))
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        mx.profiler.set_config(profile_imperative=True, filename=str(trace))
        mx.profiler.set_state("run")
        work(steps)
        mx.profiler.set_state("stop")
        mx.profiler.dump()
        print(json.dumps(idle_shares(json.loads(trace.read_text())["traceEvents"], subject.contexts)))


def _sums(copies: list[tuple[Context, Context, int]], host: Context) -> dict[str, int]:
    from_host = sum(size for source, _, size in copies if source == host)
    return {"bytes_between_devices": sum(size for *_, size in copies) - from_host, "bytes_from_host": from_host}


if __name__ == "__main__":
    _worker(sys.argv[1], Subject(**json.loads(sys.argv[2])), int(sys.argv[3]))
