"""Show the time of each phase of a step with highlevel on two contexts, recorded with MXNet's profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from bench import harness
from bench.harness import BATCH_SIZE, LR, TITLE, TUNED, Job, Step
from gluon_mgpu.data import datasets
from gluon_mgpu.runtime import log

WARM_UP, STEPS = 5, 5
CONTEXTS = 2
COLORS = {
    "forward": "#4477aa",
    "backward": "#ee8866",
    "allreduce": "#aa3377",
    "update": "#228833",
    "other": "#555555",
}
MEANING = {
    "allreduce": "allreduce: copies between devices, and sums",
    "other": "other: freeing memory, waking Python, layouts",
}
INITIALIZE_GRADIENTS = ("SetValueOp", "_full", "zeros_like")
SUM = ("add_n", "ElementwiseSum")  # in tuning.py, and in MXNet's KVStore
CONVOLUTIONS = ("Convolution", "_backward_Convolution")
OTHER = ("DeleteVariable", "DeleteOperator", "WaitForVar", "Reorder", "Reorder2Default")
ONE_BY_ONE = "Operators run one by one, not in bulk"

Spans = list[tuple[int, str, int, int]]  # (context, operator, start and end in microseconds), ordered by start


def phase(operator: str) -> str:
    """The phase of a step that an operator belongs to. All copies count as allreduce, even those of shards, because all
    copies on CPU contexts have the same name. The loss belongs to the forward pass."""
    if "_backward_" in operator or operator in INITIALIZE_GRADIENTS:
        return "backward"
    if operator.endswith("_update"):
        return "update"
    if operator.startswith(("Copy", "KVStore")) or operator in SUM:
        return "allreduce"
    return "other" if operator in OTHER else "forward"


@contextmanager
def profiled(file: str | Path) -> Iterator[None]:
    """Profile the operators that run inside this context manager, and write MXNet's profile to a file."""
    import mxnet as mx

    mx.nd.waitall()
    # aggregate_stats keeps the engine from running several operators as one, which would hide their names.
    on = dict.fromkeys(("profile_imperative", "profile_symbolic", "aggregate_stats"), True)
    off = dict.fromkeys(("profile_api", "profile_memory", "continuous_dump"), False)
    mx.profiler.set_config(filename=str(file), **on, **off)
    mx.profiler.set_state("run")
    try:
        yield
        mx.nd.waitall()
    finally:
        mx.profiler.set_state("stop")
        mx.profiler.dump()


def read_spans(file: str | Path) -> Spans:
    """Read the operators in MXNet's profile. Its processes are the contexts."""
    # MXNet writes an extra comma into every profile of a process except the first profile.
    text = Path(file).read_text().replace('"traceEvents": [\n,', '"traceEvents": [', 1)
    events = [e for e in json.loads(text)["traceEvents"] if e["ph"] in ("B", "E") and e["cat"] == "operator"]
    pairs = zip(events[::2], events[1::2])  # begin and end events alternate
    return sorted(((b["pid"], b["name"], b["ts"], e["ts"]) for b, e in pairs), key=lambda span: span[2])


def record(step: Step, lr: float, contexts: int, size: int, steps: int) -> Spans:
    """Record a few training steps on synthetic data, after a warm-up. Returns the operators of the contexts."""
    data, end = datasets.synthetic((WARM_UP + steps) * size, 100, seed=0), WARM_UP * size
    harness.train(step, lr, data, size, range(end))
    with tempfile.TemporaryDirectory() as folder:
        with profiled(Path(folder, "profile.json")):
            harness.train(step, lr, data, size, range(end, end + steps * size))
        return [span for span in read_spans(Path(folder, "profile.json")) if span[0] < contexts]


def seconds(recorded: Spans) -> float:
    """The time from the start of the first operator to the end of the last."""
    return (max(end for *_, end in recorded) - recorded[0][2]) / 1e6


def busy(recorded: Spans, context: int) -> dict[str, float]:
    """The part of the recorded time in which a context runs each operator. If operators overlap, their time counts
    once, for the earlier one."""
    parts: dict[str, float] = defaultdict(float)
    done, whole = 0, 1e6 * seconds(recorded)
    for of, operator, begin, end in recorded:
        if of == context and end > done:
            parts[operator] += (end - max(begin, done)) / whole
            done = end
    return parts


def run(model: Sequence[str]) -> dict:
    """Record the models as written and with --tune. Returns the input of `table` and `draw`."""
    cases = [(name, impl) for name in model for impl in ("highlevel", TUNED)]
    return {"runs": {f"{TITLE[name]}, {impl}": harness.start(impl, job(name, impl))["spans"] for name, impl in cases}}


def job(model: str, impl: str) -> Job:
    env = harness.environment({"MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN": "1"})  # the names of a bulk say little
    return Job("timeline", {"model": model, "impl": impl}, env)


def work(model: str, impl: str) -> dict[str, Any]:
    """Record training steps."""
    built = harness.build(impl, model, CONTEXTS)
    return {"spans": record(built.step, LR[model], CONTEXTS, BATCH_SIZE[model], STEPS)}


def table(result: dict) -> str:
    """Format each context's milliseconds per step in each phase, its idle share, and the share of convolutions."""
    rows = [[f"ms/step, mean of {STEPS}", *COLORS, "idle", "convolutions"]]
    for name, spans in result["runs"].items():
        for context in range(CONTEXTS):
            parts = busy(spans, context)
            phases = (sum(part for operator, part in parts.items() if phase(operator) == of) for of in COLORS)
            ms = (f"{1000 * part * seconds(spans) / STEPS:.2f}" for part in phases)
            shares = 1 - sum(parts.values()), sum(parts[operator] for operator in CONVOLUTIONS)
            rows.append([f"{name}, cpu({context})", *ms, *(f"{100 * share:.1f}%" for share in shares)])
    return "\n".join([harness.machine_line(), ONE_BY_ONE, *log.table(rows)])


def draw(result: dict, file: BinaryIO) -> None:
    """Draw the recorded operators as PNG, with one panel for each network as written and with --tune."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 1 + 1.8 * len(result["runs"])), layout="constrained")
    for axes, (name, spans) in zip(figure.subplots(len(result["runs"]), squeeze=False)[:, 0], result["runs"].items()):
        start = spans[0][2]
        for of, color in COLORS.items():
            for context in range(CONTEXTS):
                recorded = [span for span in spans if span[0] == context and phase(span[1]) == of]
                bars = [((begin - start) / 1000, (end - begin) / 1000) for *_, begin, end in recorded]
                axes.broken_barh(bars, (context - 0.4, 0.8), color=color, linewidth=0)
        axes.set_yticks(range(CONTEXTS), [f"cpu({context})" for context in range(CONTEXTS)])
        axes.invert_yaxis()
        axes.set_title(f"{name}: {STEPS} steps", loc="left", fontsize="medium")
    axes.set_xlabel("ms")
    handles = [Patch(color=color, label=MEANING.get(of, of)) for of, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncol=len(handles), frameon=False, fontsize="small")
    figure.savefig(file, format="png", dpi=120)
