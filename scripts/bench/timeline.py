"""`timeline`: records what each context does during a few training steps, with the engine's profiler."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any, BinaryIO

from bench import harness
from bench.harness import BATCH_SIZE, TITLE, Job
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import datasets, timeline

UNRECORDED = 4  # ratio of steps timed without the profiler to recorded steps


def run(
    impl: str = "scratch",
    model: str = "lenet",
    contexts: int = 2,
    batch_size: int | None = None,
    steps: int = timeline.STEPS,
) -> dict:
    """Record `steps` training steps on CPU contexts. Returns `timeline.summary` and the trace.

    batch_size: across all contexts; None: as in `bench.py steps`. "unrecorded_step_ms" is the mean time of steps
    without the profiler. Raises UsageError if the arguments are invalid.
    """
    size = batch_size or BATCH_SIZE.get(model, BATCH_SIZE["lenet"])
    if size < contexts:
        raise UsageError(f"batch_size={size}: must be at least {contexts}, the number of contexts")
    arguments = {"impl": impl, "model": model, "contexts": contexts, "batch_size": size, "steps": steps}
    measured = harness.start("timeline", Job("timeline", arguments, advice="use fewer steps or a smaller batch"))
    return {**arguments, **measured, **timeline.summary(measured["trace"])}


def table(result: dict) -> str:
    """Format each context's milliseconds per step in each phase, and its idle share."""
    steps, columns = len(result["step_ms"]), (*timeline.PHASES, "idle")
    rows = [[f"ms/step, mean of {steps} recorded", *columns, "idle share"]]
    for context, seconds in result["contexts"].items():
        ms = (f"{1e3 * seconds[name] / steps:.2f}" for name in columns)
        rows.append([context, *ms, f"{100 * seconds['idle_share']:.1f}%"])
    lines = [f"{result['about']}; {harness.machine_line()}", *harness.table(rows), _note(result)]
    if len(result["contexts"]) > harness.facts()["cores"]:
        lines.append("More contexts than cores: an operator that waits for a core counts as busy.")
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO) -> None:
    """Draw the trace as PNG."""
    timeline.draw(result["trace"], file, _note(result))


def _note(result: dict) -> str:
    recorded, unrecorded = median(result["step_ms"]), result["unrecorded_step_ms"]
    return f"{timeline.ONE_BY_ONE}: {recorded:.1f} ms/step; {unrecorded:.1f} without recording"


def work(impl: str, model: str, contexts: int, batch_size: int, steps: int) -> dict[str, Any]:
    """Record steps. Returns the trace, its title, and the time of a step without recording."""
    replicas = harness.replicas(impl, model, contexts)
    step = partial(replicas.train_batch, lr=0.01)
    about = f"{TITLE.get(model, model)}, {impl}, {harness.plural(contexts, 'context')}, batch {batch_size}"
    trace = harness.record(step, replicas.ctx, batch_size, steps, about)
    examples = UNRECORDED * steps * batch_size
    data = datasets.synthetic(examples, 100, seed=0)
    start = time.perf_counter()
    harness.train(step, data, batch_size, range(examples))
    unrecorded = 1e3 * (time.perf_counter() - start) / (UNRECORDED * steps)
    return {"about": about, "unrecorded_step_ms": unrecorded, "trace": trace}
