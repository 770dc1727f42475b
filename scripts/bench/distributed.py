"""What several processes cost: 2 of 1 context each against 1 of 2 contexts, over each engine.

A worker, `python -m bench.distributed JOB`, takes part in a run that `launch` or horovodrun started, or runs
alone; worker 0 prints what it measured as JSON. Nothing here imports mxnet or Horovod into the calling process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tqdm import tqdm

from bench import machine, own_process
from bench.steps import BATCH_SIZE, STEPS_PER_STEP, WARM_UP_STEPS
from gluon_mgpu.distributed import process as place
from gluon_mgpu.distributed import serve, workers
from gluon_mgpu.runtime import engine
from gluon_mgpu.training import datasets

if TYPE_CHECKING:
    from mxnet.ndarray import NDArray

TITLE = {"lenet": "LeNet", "resnet18": "ResNet-18"}
TRAINED = {"lenet": ("scratch", "highlevel"), "resnet18": ("highlevel",)}  # scratch has LeNet only
LEAST = {  # examples/s, beside those of one process
    ("horovod", "lenet"): 0.9,
    ("horovod", "resnet18"): 0.97,
    ("dist_sync", "lenet"): 0.75,
    ("dist_sync", "resnet18"): 0.9,
}
STARTED_AS = {
    "local": "1 process of 2 contexts",
    "horovod": "Horovod, 2 workers",
    "dist_sync": "dist_sync, 2 workers, 1 server",
}
SUMMED = tuple(4**n for n in range(6, 13))  # bytes of the arrays that are summed alone: 4 KB to 16 MB

NOTES = """\
ratio: examples/s beside those of 1 process of 2 contexts in the same round. MB out, in: what worker 0 sends and
receives in a step, by the kernel's count of its connections. CPU ms: of each process a step: workers, scheduler,
server. Without the exchange: 2 processes that sum nothing with each other; what the line above takes longer is the
exchange."""


class Subject(NamedTuple):
    """A way to train on 2 contexts."""

    kvstore: str  # "local": in one process
    impl: str
    model: str
    exchange: bool = True  # False: the processes train side by side, and sum nothing

    def __str__(self) -> str:
        return f"{TITLE[self.model]}, {self.impl}, {self.kvstore}{', no exchange' * (not self.exchange)}"


def run(models: Sequence[str] = tuple(TITLE), rounds: int = 3, steps: int = 100) -> dict:
    """Train each model of each implementation in each way in turn: a dict for `table`, `draw` and JSON.

    steps: of LeNet; ResNet-18's are a tenth. The result has "runs", and "sums": ms until an array of so many bytes is
    the sum over both workers, by round. "skipped": what could not be measured, a line each. Raises Error where a
    worker fails.
    """
    kvstores, skipped = installed()
    subjects = [
        subject
        for model in models
        for impl in TRAINED[model]
        for subject in (
            Subject("local", impl, model),
            *(Subject(kvstore, impl, model, exchange) for kvstore in kvstores for exchange in (True, False)),
        )
    ]
    measured: dict[Subject, list[dict]] = {subject: [] for subject in subjects}
    sums: dict[str, list[dict]] = {kvstore: [] for kvstore in kvstores}
    with progress(rounds * (len(subjects) + len(sums))) as bar:
        for _ in range(rounds):
            for subject in subjects:
                bar.set_description(str(subject))
                job = {"subject": subject._asdict(), "steps": max(5, round(steps * STEPS_PER_STEP[subject.model]))}
                measured[subject].append(in_own_processes(str(subject), subject.kvstore, __name__, job))
                bar.update()
            for kvstore in sums:
                bar.set_description(f"sums, {kvstore}")
                sums[kvstore].append(in_own_processes(f"sums, {kvstore}", kvstore, __name__, {"sums": steps}))
                bar.update()
    runs = [
        {
            **subject._asdict(),
            "batch_size": BATCH_SIZE[subject.model],
            "arrays": of_it[0]["arrays"],
            "array_bytes": of_it[0]["array_bytes"],
            **{
                name: [found[name] for found in of_it] for name in ("step_ms", "sent_bytes", "received_bytes", "cpu_ms")
            },
        }
        for subject, of_it in measured.items()
    ]
    summed = [
        {"kvstore": kvstore, "bytes": size, "ms": [found["ms"][i] for found in of_it]}
        for kvstore, of_it in sums.items()
        for i, size in enumerate(SUMMED)
    ]
    return {"rounds": rounds, "skipped": skipped, "runs": runs, "sums": summed}


def installed() -> tuple[tuple[str, ...], list[str]]:
    """Those that are installed, and a line for each that is not."""
    if importlib.util.find_spec("horovod"):
        return ("horovod", "dist_sync"), []
    return ("dist_sync",), ["Horovod is not installed, and was not measured: `make horovod` builds it"]


def progress(total: int) -> tqdm:
    return tqdm(total=total, unit="run", leave=False, disable=not sys.stderr.isatty())


def in_own_processes(name: str, kvstore: str, module: str, job: dict, seconds: float = own_process.SECONDS) -> Any:
    """What worker 0 of `python -m MODULE JOB` prints, as one process or as 2 workers. name: as in `own_process.lines`.

    Where this is ended, so are all processes of the run: both launchers see to that.
    """
    worker = module, json.dumps({"kvstore": kvstore, **job})
    program = sys.executable, "-m", *worker
    started = {
        "local": worker,
        "horovod": ("horovod.runner.launch", "--gloo", "-np", 2, "-H", "localhost:2", *program),
        "dist_sync": ("gluon_mgpu", "launch", "--workers", 2, "--servers", 1, "--", *program),
    }
    return own_process.last(name, *started[kvstore], seconds=seconds, settings={"PYTHONUNBUFFERED": "1"})


def ratios(one: dict, two: dict) -> list[float]:
    """Of each round: the examples/s of two processes beside those of one."""
    return [a / b for a, b in zip(one["step_ms"], two["step_ms"])]


def table(result: dict) -> str:
    """Lines for a terminal: for each model and implementation, each way to train with its time, its ratio and what was
    wanted, what was sent and who computed; then the sums alone."""
    lines = [
        f"2 processes of 1 context against 1 process of 2 contexts, medians of {result['rounds']} rounds (min-max);",
        f"{machine.line()}",
        NOTES,
        *result["skipped"],
    ]
    for (model, impl), runs in _series(result).items():
        title = f"{TITLE[model]}, {impl}, batch {runs[0]['batch_size']}"
        lines += [
            "",
            f"{title:32}{'ms/step':>21}{'examples/s':>11}{'ratio':>18}  {'wanted':16}{'MB out, in':>14}  CPU ms",
        ]
        for run in runs:
            of_it = ratios(runs[0], run)
            wanted, reached = LEAST.get((run["kvstore"], model)) if run["exchange"] else None, ""
            if wanted:
                reached = f"{wanted} {'' if median(of_it) >= wanted else 'not '}reached"
            who = STARTED_AS[run["kvstore"]] if run["exchange"] else "  without the exchange"
            lines.append(
                f"{who:32}{spread(run['step_ms'], 1):>21}{1000 * run['batch_size'] / median(run['step_ms']):11.0f}"
                f"{spread(of_it, 2):>18}  {reached:16}{moved(run):>14}  {_cpu(run)}"
            )
    for kvstore in dict.fromkeys(found["kvstore"] for found in result["sums"]):
        lines += ["", f"{'Arrays summed over 2 workers, ' + kvstore:44}{'ms':>24}{'MB/s':>9}"]
        for found in result["sums"]:
            if found["kvstore"] == kvstore:
                size, rate = f"{found['bytes'] / 1e3:.1f} KB", found["bytes"] / median(found["ms"]) / 1000
                lines.append(f"{size:>44}{spread(found['ms'], 2):>24}{rate:9.0f}")
    return "\n".join(lines)


def moved(run: dict) -> str:
    """Median MB that worker 0 sent and received a step."""
    return ", ".join(f"{median(run[name]) / 1e6:.2f}" for name in ("sent_bytes", "received_bytes"))


def _cpu(run: dict) -> str:
    """Median CPU ms a step of each process, in the order that `table` names."""
    return ", ".join(f"{median(of_each[who] for of_each in run['cpu_ms']):.1f}" for who in run["cpu_ms"][0])


def _series(result: dict) -> dict[tuple[str, str], list[dict]]:
    """{(model, impl): its runs, that of one process first}"""
    series: dict[tuple[str, str], list[dict]] = {}
    for run in result["runs"]:
        series.setdefault((run["model"], run["impl"]), []).append(run)
    return series


def spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """Bars of the ratio by way to train, and what was wanted; below, the sums alone: ms by bytes. PNG; file: binary and
    open, or a path."""
    from matplotlib.figure import Figure

    series = _series(result)
    figure = Figure(figsize=(max(9, 4.5 * len(series)), 8), layout="constrained")
    figure.suptitle(
        f"2 processes of 1 context against 1 process of 2, medians of {result['rounds']} rounds (lines: min to max)"
    )
    above, below = figure.subfigures(2, 1)
    for axes, ((model, impl), runs) in zip(above.subplots(1, len(series), squeeze=False)[0], series.items()):
        for i, run in enumerate(runs[1:]):
            of_it = ratios(runs[0], run)
            axes.bar(i, median(of_it), color="C0" if run["exchange"] else "0.75")
            axes.plot([i, i], [min(of_it), max(of_it)], color="black", linewidth=1.5)
            if run["exchange"]:
                wanted = LEAST[run["kvstore"], model]
                axes.plot([i - 0.4, i + 0.4], [wanted, wanted], color="tab:red")
        names = [run["kvstore"] if run["exchange"] else "without the\nexchange" for run in runs[1:]]
        axes.set_xticks(range(len(names)), names, fontsize="small")
        axes.set(title=f"{TITLE[model]}, {impl}", ylabel="examples/s beside 1 process (red: wanted)", ylim=(0, None))
        axes.axhline(1, color="0.5", linewidth=0.8)
    axes = below.subplots()
    for kvstore in dict.fromkeys(found["kvstore"] for found in result["sums"]):
        sums = [found for found in result["sums"] if found["kvstore"] == kvstore]
        sizes = [found["bytes"] for found in sums]
        axes.plot(sizes, [median(found["ms"]) for found in sums], "o-", label=kvstore)
        axes.vlines(sizes, [min(found["ms"]) for found in sums], [max(found["ms"]) for found in sums])
    axes.set(xscale="log", yscale="log", xlabel="bytes of an array", ylabel="ms until it is summed over 2 workers")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, format="png", dpi=100)


def traffic() -> tuple[int, int]:
    """(bytes sent, bytes received) over the TCP connections that this process now has, each since it was made, without
    headers. Source: the kernel's struct tcp_info, tcpi_bytes_acked and tcpi_bytes_received (linux/tcp.h)."""
    sent = received = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, none of TCP, or closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                counted = struct.unpack_from("QQ", info, 120) if len(info) == 136 else (0, 0)
                sent, received = sent + counted[0], received + counted[1]
    return sent, received


def _servers_seconds() -> dict[str, float]:
    """{name: CPU seconds} of the scheduler and the servers, which `launch` has started beside this process."""
    found, tick = {}, os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may have ended meanwhile, or be another user's
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != os.getppid():
                continue
            given = dict(e.partition("=")[::2] for e in (folder / "environ").read_text().split("\0"))
            if given.get("DMLC_ROLE") in ("scheduler", "server"):
                name = " ".join(filter(None, (given["DMLC_ROLE"], given.get("DMLC_TASK_ID"))))
                found[name] = (int(fields[11]) + int(fields[12])) / tick
    return dict(sorted(found.items()))


def _measured(group: workers.Workers, work: Callable[[], object]) -> dict:
    """Seconds, bytes and CPU seconds by process that work() takes, on all workers at the same time."""
    group.gather(None)
    before = time.perf_counter(), traffic(), _servers_seconds(), time.process_time()
    work()
    own, seconds = time.process_time() - before[3], time.perf_counter() - before[0]
    cpu = {f"worker {i}": spent for i, spent in enumerate(group.gather(own))}
    servers = _servers_seconds()
    return {
        "seconds": seconds,
        "traffic": [after - earlier for earlier, after in zip(before[1], traffic())],
        "cpu": {**cpu, **{name: servers[name] - before[2][name] for name in before[2]}},
    }


def _train_steps(group: workers.Workers, subject: Subject, steps: int) -> dict:
    """What worker 0 prints, of a step: ms, bytes, CPU ms of each process, and what it sums over all workers."""
    module = importlib.import_module(f"gluon_mgpu.{subject.impl}")
    import mxnet as mx

    from gluon_mgpu.training import loop
    from gluon_mgpu.training.settings import Settings

    several, size = group.count > 1, BATCH_SIZE[subject.model]
    ctx = [mx.cpu(i) for i in range(2 // group.count)]
    group.meet(len(ctx))
    data = datasets.synthetic(max(steps, WARM_UP_STEPS[subject.model]) * size, 100, seed=0)
    mx.random.seed(0)
    sizes = {}
    if several:
        allreduce = group.allreduce

        def counted(array: NDArray, key: int | str) -> None:
            sizes[key] = array.size * array.dtype().itemsize
            if subject.exchange:
                allreduce(array, key)

        group.allreduce = counted  # type: ignore[method-assign]  # of this one group
    replicas = module.Replicas(ctx, Settings(size, model=subject.model), workers=group if several else None)

    def work(examples: int) -> None:
        images, labels = data.train_images[:examples], data.train_labels[:examples]
        train_iter = loop.batches(images, labels, size, part=group.part)
        train_batch = partial(replicas.train_batch, lr=0.2, batch_size=size)
        loop.train_epoch(train_batch, train_iter, examples, str(subject), batch_size=size, workers=group)

    work(WARM_UP_STEPS[subject.model] * size)
    found = _measured(group, lambda: work(steps * size))
    return {
        "arrays": len(sizes),
        "array_bytes": sum(sizes.values()),
        "step_ms": 1000 * found["seconds"] / steps,
        "sent_bytes": found["traffic"][0] / steps,
        "received_bytes": found["traffic"][1] / steps,
        "cpu_ms": {name: 1000 * spent / steps for name, spent in found["cpu"].items()},
    }


def _sum_arrays(group: workers.Workers, times: int) -> dict[str, list[float]]:
    """{"ms": until an array of each size of SUMMED is the sum over all workers}: medians of so many times, of 1 MB and
    more of a tenth."""
    from mxnet import nd

    medians = []
    for key, size in enumerate(SUMMED):
        array, spent = nd.ones(size // 4), []
        for _ in range(2 + (times if size < 1e6 else max(5, times // 10))):  # the first two are cold
            array[:] = 1
            array.wait_to_read()
            start = time.perf_counter()
            group.allreduce(array, key)
            array.wait_to_read()
            spent.append(1000 * (time.perf_counter() - start))
        medians.append(median(spent[2:]))
    return {"ms": medians}


def as_worker(kvstore: str, work: Callable[[], object]) -> None:
    """Serve, where this process is a server or the scheduler; else print what work() gives, where it is worker 0."""
    here = place.asked(kvstore)
    if here.role != "worker":
        serve.serve(here)
        return
    engine.configure(2 // here.workers)
    found = work()
    if here.rank == 0:
        print(json.dumps(found), flush=True)


def _work(kvstore: str, subject: dict | None = None, steps: int = 0, sums: int = 0) -> dict:
    with workers.join(kvstore, model=subject["model"] if subject else "lenet") as group:
        return _train_steps(group, Subject(**subject), steps) if subject else _sum_arrays(group, sums)


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    as_worker(job["kvstore"], partial(_work, **job))
