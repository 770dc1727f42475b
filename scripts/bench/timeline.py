"""Records the operators of training steps with MXNet's profiler."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import harness
from bench.harness import Step
from gluon_mgpu.data import datasets

WARM_UP = 5
COLORS = {
    "forward": "#4477aa",
    "backward": "#ee8866",
    "allreduce": "#aa3377",
    "update": "#228833",
    "other": "#555555",
}
INITIALIZE_GRADIENTS = ("SetValueOp", "_full", "zeros_like")
SUM = ("add_n", "ElementwiseSum")  # in tuning.py, and in MXNet's KVStore
OTHER = ("DeleteVariable", "DeleteOperator", "WaitForVar", "Reorder", "Reorder2Default")

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
