"""`distributed`: 2 processes of 1 context each against 1 process of 2 contexts, over Horovod and MXNet's servers.

A worker, `python -m bench.distributed JOB`, is one process of a run that `launch` or horovodrun started, or runs alone.
Worker 0 prints the result. Nothing here imports mxnet or Horovod into the calling process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, BinaryIO, NamedTuple

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, LR, STEP_SHARE, TITLE, WARM_UP_STEPS, ratios, spread
from gluon_mgpu.distributed import process, serve, workers
from gluon_mgpu.runtime import engine
from gluon_mgpu.training import datasets

STARTED_AS = {
    "local": "1 process of 2 contexts",
    "horovod": "Horovod, 2 workers",
    "dist_sync": "dist_sync, 2 workers, 1 server",
}
MEASURED = ("step_ms", "sent_bytes", "received_bytes")

NOTES = """\
ratio: examples/s relative to 1 process of 2 contexts in the same round. MB out, in: what worker 0 sends and receives
per step, as the kernel counts it. Without the exchange: the 2 processes train side by side and sum nothing."""


class Subject(NamedTuple):
    """A way to train on 2 contexts."""

    kvstore: str  # "local": in one process
    impl: str
    model: str
    exchange: bool = True  # False: the processes train side by side and sum nothing

    def __str__(self) -> str:
        return f"{TITLE[self.model]}, {self.impl}, {self.kvstore}{', no exchange' * (not self.exchange)}"


def run(models: Sequence[str] = tuple(TITLE), rounds: int = 3, steps: int = 100) -> dict:
    """Train each model with each implementation in each way, in turn; returns what `table` and `draw` show.

    steps: of LeNet. "skipped": a line for each way that cannot be measured here.
    """
    kvstores, skipped = installed()
    subjects = []
    for model in models:
        for impl in IMPLS[model]:
            subjects.append(Subject("local", impl, model))
            subjects += [Subject(kvstore, impl, model, exchange) for kvstore in kvstores for exchange in (True, False)]

    def measure(subject: Subject) -> Any:
        return start(str(subject), "distributed", subject.kvstore, {"subject": subject, "steps": steps})

    runs = []
    for subject, found in harness.in_turn(subjects, rounds, measure).items():
        measured = {name: [of_round[name] for of_round in found] for name in MEASURED}
        runs.append({**subject._asdict(), "batch_size": BATCH_SIZE[subject.model], **measured})
    return {"rounds": rounds, "skipped": skipped, "runs": runs}


def installed() -> tuple[tuple[str, ...], list[str]]:
    """The kvstores that can be measured here, and a line for each one that cannot."""
    if importlib.util.find_spec("horovod"):
        return ("horovod", "dist_sync"), []
    return ("dist_sync",), ["Horovod is not installed and was not measured; `make horovod` builds it"]


def start(name: str, module: str, kvstore: str, job: dict, seconds: float = harness.SECONDS) -> Any:
    """What worker 0 of `python -m bench.MODULE JOB` prints, as one process or as 2 workers."""
    launchers = {
        "local": (),
        "horovod": ("horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2"),
        "dist_sync": ("gluon_mgpu", "launch", "--workers", "2", "--servers", "1", "--"),
    }
    launcher = [sys.executable, "-m", *launchers[kvstore]] if launchers[kvstore] else []
    env = harness.environment({"PYTHONUNBUFFERED": "1"})
    return harness.worker(name, module, {"kvstore": kvstore, **job}, env=env, launcher=launcher, seconds=seconds)


def table(result: dict) -> str:
    """Lines for a terminal: for each model and implementation, each way with its time, its ratio and what was sent."""
    lines = [
        f"2 processes of 1 context against 1 process of 2 contexts, medians of {result['rounds']} rounds (min-max);",
        harness.machine_line(),
        NOTES,
        *result["skipped"],
    ]
    for (model, impl), runs in _series(result).items():
        size = runs[0]["batch_size"]
        rows = [[f"{TITLE[model]}, {impl}, batch {size}", "ms/step", "examples/s", "ratio", "MB out, in"]]
        for run in runs:
            rate = f"{1000 * size / median(run['step_ms']):.0f}"
            ratio = spread(ratios(runs[0]["step_ms"], run["step_ms"]), 2)
            rows.append([_name(run), spread(run["step_ms"], 1), rate, ratio, megabytes(run)])
        lines += ["", *harness.table(rows)]
    return "\n".join(lines)


def _name(run: dict) -> str:
    return STARTED_AS[run["kvstore"]] if run["exchange"] else f"{run['kvstore']} without the exchange"


def megabytes(run: dict) -> str:
    """Median MB that worker 0 sent and received per step."""
    return ", ".join(f"{median(run[name]) / 1e6:.2f}" for name in ("sent_bytes", "received_bytes"))


def _series(result: dict) -> dict[tuple[str, str], list[dict]]:
    """{(model, impl): its runs, that of one process first}"""
    series: dict[tuple[str, str], list[dict]] = {}
    for run in result["runs"]:
        series.setdefault((run["model"], run["impl"]), []).append(run)
    return series


def draw(result: dict, file: BinaryIO) -> None:
    """Bars of the ratios, one panel per model and implementation. PNG."""
    panels: dict[str, dict[str, list[float]]] = {}
    for (model, impl), (one, *runs) in _series(result).items():
        values = {_name(run): ratios(one["step_ms"], run["step_ms"]) for run in runs}
        panels[f"{TITLE[model]}, {impl}"] = values
    harness.draw_bars(file, "2 processes of 1 context", "examples/s relative to 1 process of 2 contexts", panels)


def traffic() -> tuple[int, int]:
    """(bytes sent, bytes received) over this process's TCP connections since each was opened, without headers.

    Source: the kernel's struct tcp_info, tcpi_bytes_acked and tcpi_bytes_received (linux/tcp.h).
    """
    sent = received = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a TCP socket, or closed meanwhile
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                if len(info) == 136:
                    acked, got = struct.unpack_from("QQ", info, 120)
                    sent, received = sent + acked, received + got
    return sent, received


def _work(kvstore: str, subject: Sequence[Any], steps: int) -> dict[str, float]:
    """Time and traffic per step."""
    what = Subject(*subject)
    size, warm_up = BATCH_SIZE[what.model], WARM_UP_STEPS[what.model]
    steps = max(5, round(steps * STEP_SHARE[what.model]))
    data = datasets.synthetic(max(steps, warm_up) * size, 100, seed=0)
    with workers.join(kvstore, model=what.model) as group:
        contexts = 2 // group.count
        group.exchange_device_counts(contexts)
        replicas = harness.replicas(what.impl, what.model, contexts, group if what.exchange else workers.ALONE)
        train_batch = partial(replicas.train_batch, lr=LR[what.model], batch_size=size)
        harness.train(train_batch, data, size, range(warm_up * size), group.part)
        group.all_gather(None)  # all workers start at the same time
        start, before = time.perf_counter(), traffic()
        harness.train(train_batch, data, size, range(steps * size), group.part)
        group.all_gather(None)
        seconds, after = time.perf_counter() - start, traffic()
    moved = [(b - a) / steps for a, b in zip(before, after)]
    return dict(zip(MEASURED, (1000 * seconds / steps, *moved)))


def main(work: Callable[..., Any]) -> None:
    """Do what this process of a run is for: serve, or work(**JOB) and, in worker 0, print the result."""
    job = json.loads(sys.argv[1])
    here = process.expect(job["kvstore"])
    if here.role != "worker":
        serve.serve(here)
        return
    engine.configure(2 // here.workers, processes=here.local_workers)
    found = work(**job)
    if here.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(_work)
