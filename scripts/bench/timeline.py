"""Use the engine's profiler to record what each context does during a few steps. chrome://tracing and Perfetto open the
result."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any, BinaryIO

from bench import harness
from bench.harness import BATCH_SIZE, TITLE, Job
from gluon_mgpu.runtime import log
from gluon_mgpu.training import timeline


def run(impl: str, model: str, contexts: int) -> dict:
    """Record training steps on CPU contexts. Returns the trace, with the items of `timeline.summary`."""
    trace = harness.start("timeline", Job("timeline", {"impl": impl, "model": model, "contexts": contexts}))
    return {**trace, **timeline.summary(trace)}


def table(result: dict) -> str:
    """Format each context's milliseconds per step in each phase, and its idle share."""
    steps, columns = len(result["step_ms"]), (*timeline.PHASES, "idle")
    rows = [[f"ms/step, mean of {steps} recorded", *columns, "idle share"]]
    for context, seconds in result["contexts"].items():
        ms = (f"{1e3 * seconds[name] / steps:.2f}" for name in columns)
        rows.append([context, *ms, f"{100 * seconds['idle_share']:.1f}%"])
    lines = [f"{result['otherData']['about']}; {harness.machine_line()}", *log.table(rows), _note(result)]
    if len(result["contexts"]) > harness.facts()["cores"]:
        lines.append("There are more contexts than cores, so operators that wait for a core count as busy.")
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO) -> None:
    """Draw the trace as PNG."""
    timeline.draw(result, file, _note(result))


def _note(result: dict) -> str:
    return f"{timeline.ONE_BY_ONE}: {median(result['step_ms']):.1f} ms/step"


def work(impl: str, model: str, contexts: int) -> dict[str, Any]:
    """Record training steps and return the trace."""
    size = BATCH_SIZE[model]
    about = f"{TITLE[model]}, {impl}, {harness.plural(contexts, 'context')}, batch {size}"
    replicas = harness.replicas(impl, model, contexts)
    step = partial(replicas.train_batch, lr=harness.LR[model])
    return harness.record(step, replicas.ctx, size, timeline.STEPS, about)
