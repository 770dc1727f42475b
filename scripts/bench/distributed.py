"""Compare 2 MPI workers with 1 context each to 1 process with 2 contexts.

`work` runs in each process that mpiexec starts, or in a single process.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, LR, TITLE, TUNED, Dataset, Job, ratios
from gluon_mgpu.support.errors import Error

WAYS = {"1 process with 2 contexts": "local", "2 workers with 1 context each": "mpi"}  # {name: kvstore}


def run(model: Sequence[str], rounds: int, steps: int) -> dict:
    """Train the models with each implementation in each of WAYS, in turn. Returns the input of `table`.

    steps: per run of LeNet. Raises Error if mpiexec is missing.
    """
    jobs = {
        (name, impl, way): job(kvstore, impl=impl, model=name, steps=steps)
        for name in model
        for impl in IMPLS[name]
        if impl != TUNED
        for way, kvstore in WAYS.items()
    }
    measured = harness.measure(jobs, rounds)
    return {"rounds": rounds, "runs": [[*subject, run] for subject, run in measured.items()]}


def job(kvstore: str, **arguments: Any) -> Job:
    """Create a job that runs one process ("local") or two workers ("mpi"). Worker 0 prints the result."""
    launcher: tuple[str, ...] = ()
    if kvstore == "mpi":
        folders = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        mpiexec = shutil.which("mpiexec", path=folders)
        if mpiexec is None:
            raise Error("mpiexec was not found: run `pip install '.[mpi]'`")
        launcher = (mpiexec, "-n", "2")
    return Job("distributed", {"kvstore": kvstore, **arguments}, launcher=launcher)


def table(result: dict) -> str:
    """Format the times, and the speed relative to 1 process in the same round."""
    lines = [
        f"2 workers and 1 process, medians of {result['rounds']} rounds (min-max); peak MB: of all processes;",
        harness.machine_line(),
    ]
    first, runs = next(iter(WAYS)), {tuple(subject): run for *subject, run in result["runs"]}
    for model, impl in dict.fromkeys((model, impl) for model, impl, _ in runs):
        rows = []
        for way in WAYS:
            run = runs[model, impl, way]
            rows.append((way, BATCH_SIZE[model], run, {"speed": ratios(runs[model, impl, first], run)}))
        lines += ["", *harness.speed_table(f"{TITLE[model]}, {impl}, batch {BATCH_SIZE[model]}", rows)]
    return "\n".join(lines)


def work(kvstore: str, impl: str, model: str, steps: int) -> dict[str, float] | None:
    """Measure a step. Returns worker 0's result."""
    from gluon_mgpu.training import workers

    with workers.join(kvstore) as group:
        contexts, size = 2 // group.size, BATCH_SIZE[model]
        built = harness.build(impl, model, contexts)
        from gluon_mgpu.training.step import assemble

        step = assemble(built, group) if group.size > 1 else built.step

        def train(data: Dataset, order: np.ndarray) -> tuple[float, float]:
            group.total(0)  # all workers start at the same time
            start = time.perf_counter()
            loss = harness.train(step, LR[model], data, size, order, lambda n: group.own_indices(n, contexts))
            group.total(0)
            return loss, time.perf_counter() - start

        measured = harness.time_steps(train, model, size, steps)
        measured["peak_mb"] = group.total(measured["peak_mb"])
        measured["loss"] = group.total(measured["loss"]) / group.size
        return measured if group.rank == 0 else None
