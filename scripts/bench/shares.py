"""Compare equal and unequal shards while one of two cores also runs other programs.

A worker keeps the thread of each context on its own core, so that programs on the second core slow down only cpu(1).
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from bench import harness
from bench.harness import BATCH_SIZE, LR, Job
from bench.steps import timed
from gluon_mgpu.runtime import engine, log
from gluon_mgpu.runtime.errors import UsageError

SIZE = BATCH_SIZE["lenet"]
SHARES = {"cpu(0) alone": None, "equal shards": (50, 50), "shares 80,20": (80, 20)}
PROGRAMS = (0, 3)  # number of programs that share the second core with the context's thread
# Starts programs on a core, then becomes the worker. `subprocesses.run` ends the programs when the worker ends.
LAUNCHER = 'for i in $(seq {programs}); do taskset -c {core} sh -c "while :; do :; done" & done; exec "$@"'


def run(rounds: int = 3, steps: int = 100) -> dict:
    """Measure LeNet with each combination of SHARES and PROGRAMS. Returns the input of `table`.
    Raises UsageError if this process may use only one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UsageError(None, None, "shares needs 2 cores, but this process may use only 1")
    env = harness.environment(harness.ONE_THREAD)
    launchers = {n: ("sh", "-c", LAUNCHER.format(programs=n, core=cores[1]), "sh") for n in PROGRAMS}
    jobs = {
        (name, programs): Job("shares", {"shares": shares, "steps": steps}, env, launcher)
        for name, shares in SHARES.items()
        for programs, launcher in launchers.items()
    }
    measured = harness.measure(jobs, rounds)
    runs = [{"name": name, "programs": programs, **measured[name, programs]} for name, programs in jobs]
    return {"rounds": rounds, "runs": runs}


def table(result: dict) -> str:
    """Format ms per step for each of SHARES, without and with other programs."""
    rows: dict[str, list[str]] = {}
    for run in result["runs"]:
        rows.setdefault(run["name"], [run["name"]]).append(harness.spread(run["step_ms"], 1))
    head = ["", *(f"ms/step, {n} other programs" for n in PROGRAMS)]
    title = f"LeNet, scratch, batch {SIZE}, medians of {result['rounds']} rounds (min-max);"
    where = "The other programs run on the core of cpu(1)."
    return "\n".join([title, harness.machine_line(), where, *log.table([head, *rows.values()])])


def work(shares: list[int] | None, steps: int) -> dict[str, Any]:
    """Measure a step. shares: one per device; None: only cpu(0)."""
    contexts, cores = 2 if shares else 1, sorted(os.sched_getaffinity(0))
    engine.configure(contexts)
    import mxnet as mx

    for i, core in enumerate(cores[:contexts]):
        os.sched_setaffinity(0, {core})  # inherited by the thread of cpu(i), which starts with its first operator
        mx.nd.ones(1, ctx=mx.cpu(i)).wait_to_read()
    os.sched_setaffinity(0, cores)
    replicas = harness.replicas("scratch", "lenet", contexts, shares=shares)
    train = timed(partial(replicas.train_batch, lr=LR["lenet"]), SIZE)
    return harness.time_steps(train, "lenet", SIZE, steps)
