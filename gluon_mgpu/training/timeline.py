"""Records what each context does during a few training steps, as a Chrome trace and as a picture.

The trace is for chrome://tracing or Perfetto. docs/engine.md describes MXNet's profiler.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gluon_mgpu.runtime import files
from gluon_mgpu.runtime.errors import Error, UsageError

if TYPE_CHECKING:
    from mxnet import Context

WARM_UP = 10  # minimum number of steps before the recorded steps
STEPS = 5  # steps that are shown
AROUND = 2  # steps recorded but not shown, one before and one after, so that the engine is busy in all shown steps
HOST_LANES = 2  # one lane for pinned and one for shared host memory, after the lanes of cores and GPUs
GPU_LANES = 32  # number of lanes for GPUs in a build with CUDA

COLORS = {
    "forward": "#4477aa",
    "backward": "#ee8866",
    "allreduce": "#aa3377",
    "update": "#228833",
    "other": "#555555",
    "idle": "#e8e8e8",
}
PHASES = tuple(COLORS)[:-1]
WORKERS = "workers"  # name of the lane for sums over workers, which overlap with a context's operators
MEANING = {
    "allreduce": "allreduce: copies between devices, and sums",
    "other": "other: freeing memory, waking Python, layouts",
}
ONE_BY_ONE = "During recording, imperative operators run one by one, not in bulk"

# {phase: operators}. In addition, names that contain `_backward_` belong to backward, names that end with `_update` to
# update, and names that begin with `Copy` to allreduce. All other operators belong to forward, which includes the loss.
OPERATORS = {
    "backward": ("SetValueOp", "_full", "zeros_like"),  # these initialize gradients to ones or zeros
    "allreduce": ("add_n", "broadcast_add", "ElementwiseSum"),  # sums in scratch, in tuning and in MXNet's KVStore
    # Gradient clipping uses these operators.
    "update": ("square", "sum", "stack", "sqrt", "_plus_scalar", "_rdiv_scalar", "_minimum_scalar", "broadcast_mul"),
    # These free memory or a network, wake Python when an array is ready, or change a layout for oneDNN.
    "other": ("DeleteVariable", "DeleteOperator", "WaitForVar", "Reorder", "Reorder2Default"),
}


def phase(operator: str, adds: bool = False) -> str:
    """Return the phase of an operator, or of a bulk (several operators that MXNet runs as one), given its name.

    adds: whether the network itself adds arrays; if so, additions count as forward or backward. All copies count as
    allreduce, even copies of shards to devices, because all copies on CPU contexts have the same name.
    """
    if "_backward_" in operator:
        return "backward"
    if adds and operator in ("broadcast_add", "add_n"):
        return "forward" if operator == "broadcast_add" else "backward"
    if operator.endswith("_update"):
        return "update"
    if operator.startswith("Copy") or _is_exchange(operator):
        return "allreduce"
    return next((phase for phase, operators in OPERATORS.items() if operator in operators), "forward")


def _is_exchange(operator: str) -> bool:
    """Whether an operator sums an array over the workers (`distributed.stores`)."""
    return operator.startswith(("horovod_", "KVStoreDist"))


@contextmanager
def profiled(file: Path) -> Iterator[None]:
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


def read_profile(file: Path) -> list[dict[str, Any]]:
    """Read the traceEvents of MXNet's profile."""
    # MXNet writes an extra comma into every profile of a process except the first profile.
    return json.loads(file.read_text().replace('"traceEvents": [\n,', '"traceEvents": [', 1))["traceEvents"]


def operator_spans(raw: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the begin and end events of each operator in MXNet's traceEvents, sorted by start time."""
    events = [e for e in raw if e["ph"] in ("B", "E") and e["cat"] == "operator"]  # begin and end events alternate
    return sorted(zip(events[::2], events[1::2]), key=lambda span: span[0]["ts"])


class Recorder:
    """Profiles a few steps of a training run. The training loop issues each step inside `with recorder.step():`.

    The recorded steps follow a warm-up and are all in one epoch. The recorder waits for the engine before and after
    these steps; this does not change the computed values. It then writes the trace. On exit, it draws the picture
    (.png).
    """

    def __init__(
        self,
        file: str | Path,
        ctx: list[Context],
        about: str,
        total: int,
        steps_per_epoch: int,
        before: int = 0,
        steps: int = STEPS,
    ) -> None:
        """file: path of the trace. about: title of the picture. total: number of steps in the whole run. before: number
        of steps that are already finished.

        Raises UsageError if the file is invalid, the profiler does not support a context, or the run has too few steps.
        """
        self.file, self.about, self.issued, self.needed = Path(file), about, before, steps + AROUND
        self.profile = ExitStack()
        self.trace: dict[str, Any] = {}  # filled once all steps are recorded
        self.lanes = _lanes(ctx)
        if self.file.suffix == ".png" or self.file.is_dir() or not self.file.parent.is_dir():
            raise UsageError("profile", file, "must be a file such as profile.json in an existing folder")
        self.first = before + WARM_UP
        if self.first % steps_per_epoch + self.needed > steps_per_epoch:  # the epoch ends too soon
            self.first = (self.first // steps_per_epoch + 1) * steps_per_epoch
        if steps_per_epoch < self.needed or self.first + self.needed > total:
            advice = (
                f"recording needs {WARM_UP} warm-up steps, then {self.needed} steps within one epoch, but an epoch has "
                f"{steps_per_epoch} steps, and {total - before} are left; use more epochs or smaller batches"
            )
            raise UsageError("profile", file, advice)

    def __enter__(self) -> Recorder:
        self.folder = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *_: object) -> None:
        self.profile.close()
        self.folder.cleanup()
        if self.trace:
            files.write_whole(self.file.with_suffix(".png"), partial(draw, self.trace))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Issue one training step inside this context manager."""
        raw = Path(self.folder.name) / "profile.json"
        if self.issued == self.first:
            self.profile.enter_context(profiled(raw))
        yield
        self.issued += 1
        if self.issued == self.first + self.needed:
            self.profile.close()
            self.trace = chrome_trace(read_profile(raw), self.lanes, self.needed, self.about)
            files.write_whole(self.file, lambda file: file.write(json.dumps(self.trace).encode()))


class NoRecorder(nullcontext):
    """A recorder that records nothing."""

    step = nullcontext


def _lanes(ctx: list[Context]) -> dict[int, str]:
    """Returns {lane number: name} of the contexts. MXNet's profiler has one lane per core that this process may use,
    and aborts the process if an operator runs on a context without a lane."""
    import mxnet as mx

    cores = len(os.sched_getaffinity(0))
    gpus = GPU_LANES if mx.runtime.Features().is_enabled("CUDA") else 0
    lanes = {c.device_id + (cores if c.device_type == "gpu" else 0): str(c) for c in ctx}
    if max(lanes) >= cores + gpus + HOST_LANES:
        most = f"cpu({cores + gpus + HOST_LANES - 1})"
        advice = f"on {cores} cores, MXNet's profiler supports contexts up to {most}; use fewer devices"
        raise UsageError("profile", lanes[max(lanes)], advice)
    return lanes


def chrome_trace(raw: list[dict[str, Any]], lanes: dict[int, str], steps: int, about: str = "") -> dict[str, Any]:
    """Convert a profile to a Chrome trace (dict). Each lane becomes a process, and each event's category is its phase.
    Sums over workers get their own lane, because they run while a context computes.

    raw: MXNet's traceEvents. lanes: {lane number: name} of the training contexts. steps: number of recorded steps,
    including the two that are not shown (see AROUND). A step ends with its last update on any context.
    Raises Error if the number of updates is not a multiple of steps.
    """
    spans = operator_spans(raw)
    updates = sorted(end["ts"] for begin, end in spans if begin["pid"] in lanes and begin["name"].endswith("_update"))
    if not updates or len(updates) % steps:
        raise Error(f"the profile is incomplete: {len(updates)} updates in {steps} steps")
    per_step, start = len(updates) // steps, spans[0][0]["ts"]
    ends = updates[per_step - 1 :: per_step]

    def event(name: str, category: str, begin: int, end: int, pid: int, tid: int = 0) -> dict[str, Any]:
        span = {"ts": begin - start, "dur": end - begin, "pid": pid, "tid": tid}
        return {"name": name, "cat": category, "ph": "X", **span}

    adds = any(begin["name"] == "_backward_broadcast_add" for begin, _ in spans)
    steps_lane = max({*lanes, *(begin["pid"] for begin, _ in spans)}) + 1
    workers_lane = steps_lane + 1
    events = []
    for begin, end in spans:
        lane = workers_lane if _is_exchange(begin["name"]) else begin["pid"]
        events.append(event(begin["name"], phase(begin["name"], adds), begin["ts"], end["ts"], lane, begin["tid"]))
    if any(e["pid"] == workers_lane for e in events):
        lanes = {**lanes, workers_lane: WORKERS}
    processes = {**{e["pid"]: "host" for e in events}, **lanes, steps_lane: "steps"}
    for i, (begin, end) in enumerate(zip(ends, ends[1:-1]), 1):
        events.append(event(f"step {i}", "step", begin, end, steps_lane))
    for pid, name in sorted(processes.items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}})
    contexts = {name: pid for pid, name in lanes.items()}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"about": about, "contexts": contexts}}


def summary(trace: dict[str, Any]) -> dict[str, Any]:
    """Compute the seconds that each context spent in each phase during the shown steps, as a JSON-serializable dict.

    Returns {"window_s", "step_ms": [...], "contexts": {name: {phase: seconds, ..., "idle": seconds, "idle_share"}}}. If
    operators on a context overlap, the overlap is counted only once, for the earlier operator. With several workers,
    "contexts" includes the lane for sums over workers. trace: the content of the trace file.
    """
    steps = _steps(trace)
    window = steps[-1][1] - steps[0][0]
    contexts = {}
    for context, spans in lanes(trace).items():
        seconds = {phase: sum(end - begin for p, begin, end in spans if p == phase) / 1e6 for phase in PHASES}
        idle = window - sum(end - begin for _, begin, end in spans)
        contexts[context] = {**seconds, "idle": idle / 1e6, "idle_share": idle / window}
    return {
        "window_s": window / 1e6,
        "step_ms": [(end - begin) / 1e3 for begin, end in steps],
        "contexts": contexts,
    }


def lanes(trace: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """Returns {context: [(phase, begin, end), ...]} of the shown steps, in microseconds, sorted, without overlaps."""
    steps = _steps(trace)
    found: dict[str, list[tuple[str, float, float]]] = {}
    for context, pid in trace["otherData"]["contexts"].items():
        events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]
        found[context], done = [], steps[0][0]
        for event in sorted(events, key=lambda e: e["ts"]):
            begin, end = max(event["ts"], done), min(event["ts"] + event["dur"], steps[-1][1])
            if end > begin:
                found[context].append((event["cat"], begin, end))
                done = end
    return found


def _steps(trace: dict[str, Any]) -> list[tuple[float, float]]:
    return [(e["ts"], e["ts"] + e["dur"]) for e in trace["traceEvents"] if e.get("cat") == "step"]


def draw(trace: dict[str, Any], file: BinaryIO | str | Path, note: str = ONE_BY_ONE) -> None:
    """Draw a trace as a PNG image, with all shown steps at the top and the end of one step enlarged at the bottom.

    file: an open binary file or a path. note: text of the line below the title.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    steps, spans = _steps(trace), lanes(trace)
    start, end = steps[0][0], steps[-1][1]

    def ms(time: float) -> float:
        return (time - start) / 1e3

    figure = Figure(figsize=(12, 2.6 + 1.3 * len(spans)), layout="constrained")
    whole, part = figure.subplots(2, 1)
    for axes in (whole, part):
        for y, of_context in enumerate(spans.values()):
            bars = [("idle", start, end), *of_context]
            colors = [COLORS[name] for name, *_ in bars]
            axes.broken_barh([(ms(b), (e - b) / 1e3) for _, b, e in bars], (y - 0.4, 0.8), color=colors, linewidth=0)
        for _, step_end in steps[:-1]:
            axes.axvline(ms(step_end), color="black", linewidth=0.8)
        axes.set_yticks(range(len(spans)), spans)
        axes.invert_yaxis()
    contexts = summary(trace)["contexts"]
    whole.set_yticks(range(len(spans)), [f"{c}\nidle {100 * contexts[c]['idle_share']:.1f}%" for c in contexts])
    whole.set_xlim(0, ms(end))
    top = {"transform": whole.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": "small"}
    for i, (begin, end) in enumerate(steps, 1):
        whole.text(ms((begin + end) / 2), 1.02, f"step {i}", **top)
    middle = (len(steps) - 1) // 2
    begin, end = steps[middle]
    part.set_xlim(ms(end - 0.1 * (end - begin)), ms(end + 0.05 * (end - begin)))
    part.set_title(f"the end of step {middle + 1}, enlarged", fontsize="small")
    part.set_xlabel("ms")
    handles = [Patch(color=color, label=MEANING.get(name, name)) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncol=len(handles), frameon=False, fontsize="small")
    figure.suptitle(f"{trace['otherData']['about']}\n{note}", fontsize="medium")
    figure.savefig(file, format="png", dpi=120)
