"""Compare 2 processes with 1 context each to 1 process with 2 contexts. Uses Horovod and parameter servers.

`work` runs in each process that `launch` or horovodrun starts, or in a single process. Nothing here imports mxnet
or Horovod into the calling process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, LR, TITLE, Dataset, Job, ratios
from gluon_mgpu.distributed import process, serve, workers
from gluon_mgpu.runtime import engine

LAUNCHERS = {
    "horovod": ("horovod.runner.launch", "--gloo", "-np", "2", "-H", "localhost:2"),
    "dist_sync": ("gluon_mgpu", "launch", "--workers", "2", "--servers", "1", "--"),
}

NOTES = """\
ratio: examples/s relative to 1 process with 2 contexts in the same round. MB out, in: megabytes that worker 0 sends and
receives per step, as counted by the kernel. "without the exchange": the 2 processes do not sum gradients.
Horovod is measured if it is installed; `make horovod` builds it."""


def run(model: Sequence[str] = tuple(TITLE), rounds: int = 3, steps: int = 100) -> dict:
    """Train the models with each implementation in each setup, in turn. Returns the input of `table`.

    steps: per run of LeNet.
    """
    ways: dict[str, dict[str, Any]] = {"1 process of 2 contexts": {"kvstore": "local", "exchange": True}}
    for kvstore in installed():
        ways[f"{kvstore}, 2 processes"] = {"kvstore": kvstore, "exchange": True}
        ways[f"{kvstore}, without the exchange"] = {"kvstore": kvstore, "exchange": False}
    jobs = {
        (name, impl, way): job(impl=impl, model=name, steps=steps, **arguments)
        for name in model
        for impl in IMPLS[name]
        for way, arguments in ways.items()
    }
    measured = harness.measure(jobs, rounds)
    runs = [{"model": name, "impl": impl, "way": way, **measured[name, impl, way]} for name, impl, way in jobs]
    return {"rounds": rounds, "runs": runs}


def installed() -> list[str]:
    """The kvstores that this environment can measure."""
    return [kvstore for kvstore in LAUNCHERS if kvstore != "horovod" or importlib.util.find_spec("horovod")]


def job(kvstore: str, **arguments: Any) -> Job:
    """Create a job that runs one process ("local") or two workers. Worker 0 prints the result."""
    launcher = (sys.executable, "-m", *LAUNCHERS[kvstore]) if kvstore != "local" else ()
    env = harness.environment({"PYTHONUNBUFFERED": "1"})
    return Job("distributed", {"kvstore": kvstore, **arguments}, env, launcher)


def table(result: dict) -> str:
    """Format the time, ratio and traffic of each setup, for each model and implementation."""
    lines = [
        f"2 processes, 1 context each, and 1 process with 2 contexts; medians of {result['rounds']} rounds (min-max);",
        harness.machine_line(),
        NOTES,
    ]
    for (model, impl), group in groupby(result["runs"], itemgetter("model", "impl")):
        runs, size, rows = list(group), BATCH_SIZE[model], []
        for run in runs:
            sent, received = (f"{median(run[name]) / 1e6:.2f}" for name in ("sent_bytes", "received_bytes"))
            columns = {"ratio": ratios(runs[0], run), "MB out, in": f"{sent}, {received}"}
            rows.append((run["way"], size, run, columns))
        lines += ["", *harness.speed_table(f"{TITLE[model]}, {impl}, batch {size}", rows)]
    return "\n".join(lines)


def traffic() -> np.ndarray:
    """Count (bytes sent, bytes received), without headers, over this process's TCP connections since each was opened.

    Source: the kernel's struct tcp_info, tcpi_bytes_acked and tcpi_bytes_received (linux/tcp.h).
    """
    total = np.zeros(2)
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not a TCP socket, or already closed
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                total += struct.unpack_from("QQ", info, 120)
    return total


def measure(kvstore: str, exchange: bool, impl: str, model: str, steps: int) -> dict[str, float]:
    """Measure time and traffic per step. exchange: if False, the processes do not sum gradients."""
    size = BATCH_SIZE[model]
    moved = np.zeros(2)
    with workers.join(kvstore) as group:
        contexts = 2 // group.count
        group.exchange_device_counts(contexts)
        replicas = harness.replicas(impl, model, contexts, group if exchange else workers.ALONE)
        step = partial(replicas.train_batch, lr=LR[model], batch_size=size)

        def train(data: Dataset, order: np.ndarray) -> tuple[float, float]:
            group.all_gather(None)  # all workers start at the same time
            before, start = traffic(), time.perf_counter()
            loss = harness.train(step, data, size, order, group.part)
            group.all_gather(None)
            seconds = time.perf_counter() - start
            moved[:] = (traffic() - before) * size / len(order)
            return loss, seconds

        found = harness.time_steps(train, model, size, steps)
    return {**found, "sent_bytes": moved[0], "received_bytes": moved[1]}


def work(kvstore: str, **arguments: Any) -> dict[str, float] | None:
    """Serve or measure, depending on this process's role. Returns worker 0's result."""
    here = process.require(kvstore)
    if here.role != "worker":
        serve.serve(here)
        return None
    engine.configure(2 // here.workers)
    found = measure(kvstore, **arguments)
    return found if here.rank == 0 else None
