"""`timeline`: what each context does during a few training steps, from the engine's profile.

The worker, `python -m bench.timeline JOB`, trains on synthetic data.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from bench import harness
from bench.harness import BATCH_SIZE, TITLE
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import checkpoint, datasets, timeline

TRACE = "timeline.trace.json"
UNRECORDED = 4  # times as many steps are timed without the profile
LR = 0.01


def run(
    impl: str = "scratch",
    model: str = "lenet",
    contexts: int = 2,
    batch_size: int | None = None,
    steps: int = timeline.STEPS,
    out: str | Path | None = None,
) -> dict:
    """Record `steps` training steps on CPU contexts; returns a dict for JSON, see `timeline.summary`.

    batch_size: over all contexts; default: the model's in `bench.py steps`. out: a folder for the trace.
    "unrecorded_step_ms" is the mean of steps without the profile. Raises UsageError for what cannot be trained or
    recorded.
    """
    size = batch_size or BATCH_SIZE.get(model, BATCH_SIZE["lenet"])
    if size < contexts:
        raise UsageError(f"batch_size={size}: smaller than the number of contexts, {contexts}")
    job = {"impl": impl, "model": model, "contexts": contexts, "batch_size": size, "steps": steps}
    measured = harness.worker("timeline", "timeline", job, advice="use fewer steps or a smaller batch")
    trace = measured.pop("trace")
    result = {**job, **measured, **timeline.summary(trace)}
    if out:
        file = harness.folder_for(out) / TRACE
        checkpoint.write_whole(file, lambda file: file.write(json.dumps(trace).encode()))
        result["trace"] = str(file)
    return result


def table(result: dict) -> str:
    """Lines for a terminal: for each context, the milliseconds per step in each phase, and its idle share."""
    steps, columns = len(result["step_ms"]), (*timeline.PHASES, "idle")
    rows = [[f"ms/step, mean of {steps} recorded", *columns, "idle share"]]
    for context, seconds in result["contexts"].items():
        ms = (f"{1e3 * seconds[name] / steps:.2f}" for name in columns)
        rows.append([context, *ms, f"{100 * seconds['idle_share']:.1f}%"])
    lines = [f"{result['about']}; {harness.machine_line()}", *harness.table(rows), _note(result)]
    if len(result["contexts"]) > harness.facts()["cores"]:
        lines.append("More contexts than cores: an operator that waits for a core counts as busy.")
    if result["unknown"]:
        lines.append(f"other includes operators without a phase: {', '.join(result['unknown'])}")
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO) -> None:
    """The trace of a result that was written to a folder. PNG."""
    timeline.draw(timeline.read(result["trace"]), file, _note(result))


def _note(result: dict) -> str:
    return (
        f"{timeline.ONE_BY_ONE}: {median(result['step_ms']):.1f} ms/step, without recording "
        f"{result['unrecorded_step_ms']:.1f}"
    )


def work(impl: str, model: str, contexts: int, batch_size: int, steps: int) -> dict[str, Any]:
    """The trace, what was trained, and how long a step took without recording."""
    replicas = harness.replicas(impl, model, contexts)
    train_batch = partial(replicas.train_batch, lr=LR)
    about = f"{TITLE.get(model, model)}, {impl}, {harness.plural(contexts, 'context')}, batch {batch_size}"
    trace = harness.record(train_batch, replicas.ctx, batch_size, steps, about)
    examples = UNRECORDED * steps * batch_size
    data = datasets.synthetic(examples, 100, seed=0)
    start = time.perf_counter()
    harness.train(train_batch, data, batch_size, range(examples))
    unrecorded = 1e3 * (time.perf_counter() - start) / (UNRECORDED * steps)
    return {"about": about, "unrecorded_step_ms": unrecorded, "trace": trace}


if __name__ == "__main__":
    print(json.dumps(work(**json.loads(sys.argv[1]))))
