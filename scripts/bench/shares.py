"""Compare equal and unequal shards while other programs run on one of two cores.

A worker keeps the thread of each context on its own core, so that programs on the second core slow down only cpu(1).
"""

from __future__ import annotations

import os
from typing import Any

from bench import harness
from bench.harness import BATCH_SIZE, LR, Job
from gluon_mgpu.compat import startup
from gluon_mgpu.runtime import log
from gluon_mgpu.runtime.errors import UsageError

SIZE = BATCH_SIZE["lenet"]
SHARES = {"equal shards": (50, 50), "shares 80,20": (80, 20)}
PROGRAMS = 3  # number of programs that share the second core with the context's thread
# Starts programs on a core, then becomes the worker. `subprocesses.run` ends the programs when the worker ends.
LAUNCHER = 'for i in $(seq {programs}); do taskset -c {core} sh -c "while :; do :; done" & done; exec "$@"'


def run(rounds: int, steps: int) -> dict:
    """Measure LeNet with each of SHARES. Returns the input of `table`. Raises UsageError if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UsageError(None, None, "shares needs 2 cores, but this process may use only 1")
    env = harness.environment(harness.ONE_THREAD)
    launcher = ("sh", "-c", LAUNCHER.format(programs=PROGRAMS, core=cores[1]), "sh")
    jobs = {name: Job("shares", {"shares": s, "steps": steps}, env, launcher) for name, s in SHARES.items()}
    return {"rounds": rounds, "runs": harness.measure(jobs, rounds)}


def table(result: dict) -> str:
    """Format ms per step for each of SHARES."""
    title = f"LeNet, scratch, batch {SIZE}, with {PROGRAMS} programs on the core of cpu(1), medians of"
    rows = [["", "ms/step"], *([name, harness.spread(run["step_ms"], 1)] for name, run in result["runs"].items())]
    return "\n".join([f"{title} {result['rounds']} rounds (min-max);", harness.machine_line(), *log.table(rows)])


def work(shares: list[int], steps: int) -> dict[str, Any]:
    """Measure a step. shares: one per device."""
    startup.configure(2)
    import mxnet as mx

    from gluon_mgpu.training.step import extended
    from gluon_mgpu.training.workers import Group

    cores = sorted(os.sched_getaffinity(0))
    for i, core in enumerate(cores[:2]):
        os.sched_setaffinity(0, {core})  # inherited by the thread of cpu(i), which starts with its first operator
        mx.nd.ones(1, ctx=mx.cpu(i)).wait_to_read()
    os.sched_setaffinity(0, cores)
    model = harness.build("scratch", "lenet", 2, shares=shares)
    return harness.time_steps(harness.timed(extended(model, Group()), LR["lenet"], SIZE), "lenet", SIZE, steps)
