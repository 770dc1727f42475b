"""Where the time of a training step goes on each context: the engine's own profile, in a process of its own.

The worker, `python -m bench.timeline WHAT FILE`, trains on synthetic data and leaves the trace in FILE; WHAT
and what it prints are JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from bench import machine, own_process
from bench.steps import BATCH_SIZE
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint, datasets
from gluon_mgpu.training import timeline as recording

TRACE = "timeline.trace.json"
TITLE = {"lenet": "LeNet", "resnet18": "ResNet-18"}
UNRECORDED = 4  # times as many steps are timed without the profile


def run(
    impl: str = "scratch",
    model: str = "lenet",
    contexts: int = 2,
    batch_size: int | None = None,
    steps: int = recording.STEPS,
    out: str | Path | None = None,
) -> dict:
    """Record `steps` training steps on CPU contexts; returns a dict for JSON, see `recording.summary`.

    batch_size: of all contexts together; default the model's in `bench steps`. out: a folder to leave the trace in.
    "unrecorded_step_ms" is the mean of steps of the same process that were not recorded. Raises UsageError for what
    cannot be trained or recorded.
    """
    what: dict[str, Any] = {
        "impl": impl,
        "model": model,
        "contexts": contexts,
        "batch_size": batch_size or BATCH_SIZE[model],
    }
    what["steps"] = steps
    if impl == "scratch" and model != "lenet":
        raise UsageError(f"model {model}: scratch has lenet only; --impl highlevel has the others")
    if what["batch_size"] < contexts:
        raise UsageError(
            f"a batch of {what['batch_size']} on {contexts} contexts: give a larger batch, or fewer contexts"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / TRACE
        own = (("TMPDIR", folder),)  # for all that the worker writes, however it ends
        advice = "give fewer steps, or a smaller batch"
        given = json.dumps(what), file
        measured = own_process.last("timeline", "bench.timeline", *given, settings=own, advice=advice)
        trace, content = recording.read(file), file.read_bytes()
    result = {**what, **measured, **recording.summary(trace)}
    if out:
        kept = Path(out) / TRACE
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Error(f"--out {out}: cannot be written ({error.strerror}): give another folder") from None
        checkpoint.write_whole(kept, lambda f: f.write(content))
        result["trace"] = str(kept)
    return result


def table(result: dict) -> str:
    """Lines for a terminal: for each context the milliseconds of a step in each phase, and its idle share."""
    steps, columns = len(result["step_ms"]), (*recording.PHASES, "idle")
    lines = [
        f"{result['about']}; {machine.line()}",
        f"{f'ms a step, mean of {steps} recorded':32}" + "".join(f"{name:>10}" for name in columns) + "  idle share",
    ]
    for context, seconds in result["contexts"].items():
        row = "".join(f"{1e3 * seconds[name] / steps:10.2f}" for name in columns)
        lines.append(f"{context:32}{row}{100 * seconds['idle_share']:11.1f}%")
    lines.append(_cost(result))
    if len(result["contexts"]) > machine.facts()["cores"]:
        lines.append("More contexts than cores: an operator that waits for a core counts as busy.")
    if result["unknown"]:
        lines.append(f"other holds operators that are in no phase: {', '.join(result['unknown'])}")
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """The trace of a result that was left in a folder, as a PNG picture. file: binary and open, or a path."""
    recording.draw(recording.read(result["trace"]), file, _cost(result))


def _cost(result: dict) -> str:
    return (
        f"{recording.ONE_BY_ONE}: a step took {median(result['step_ms']):.1f} ms, "
        f"and {result['unrecorded_step_ms']:.1f} ms where not recorded"
    )


def _worker(impl: str, model: str, contexts: int, batch_size: int, steps: int, file: str) -> None:
    engine.configure(contexts)
    module = importlib.import_module(f"gluon_mgpu.{impl}")
    import mxnet as mx

    from gluon_mgpu.training import loop
    from gluon_mgpu.training.settings import Settings

    mx.random.seed(0)
    replicas = module.Replicas([mx.cpu(i) for i in range(contexts)], Settings(batch_size, model=model))
    recorded, timed = recording.WARM_UP + steps + recording.AROUND, UNRECORDED * steps
    data = datasets.synthetic(max(recorded, timed) * batch_size, 100, seed=0)

    def train(steps: int) -> float:
        examples = steps * batch_size
        start = time.perf_counter()
        data_iter = loop.batches(data.train_images[:examples], data.train_labels[:examples], batch_size)
        loop.train_epoch(lambda X, y: replicas.train_batch(X, y, 0.01), data_iter, examples, impl)
        return time.perf_counter() - start

    about = f"{TITLE[model]}, {impl}, {contexts} context{'s'[: contexts > 1]}, batch {batch_size}"
    with recording.recorded(file, replicas, about, recorded, recorded, steps=steps):
        train(recorded)
    print(json.dumps({"about": about, "unrecorded_step_ms": 1e3 * train(timed) / timed}))


if __name__ == "__main__":
    _worker(**json.loads(sys.argv[1]), file=sys.argv[2])
