"""Record what each context does during some training steps, as a Chrome trace and as a picture.

`Recorder` profiles steps and writes the trace, which chrome://tracing and Perfetto open; `summary` computes seconds and
idle shares from it; `draw` draws it, one lane per context. docs/engine.md describes the profile.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint

if TYPE_CHECKING:
    from mxnet import Context

WARM_UP = 10  # steps before the recorded ones
STEPS = 5  # shown
AROUND = 2  # also recorded: one step before and one after these, so that the engine is as busy as usual
HOST_LANES = 2  # one for pinned, one for shared host memory, after the lanes of cores and GPUs
GPU_LANES = 32  # in a build with CUDA

COLORS = {
    "forward": "#4477aa",
    "backward": "#ee8866",
    "allreduce": "#aa3377",
    "update": "#228833",
    "other": "#555555",
    "idle": "#e8e8e8",
}
PHASES = tuple(COLORS)[:-1]  # of an operator
MEANING = {
    "allreduce": "allreduce: copies between devices, and adds",
    "other": "other: freeing memory, waking Python, layouts",
}
ONE_BY_ONE = "During recording, imperative operators run one by one, not in bulk"
SEPARATOR = ","  # in the name of a bulk, between the operators of a hybridized network

# The operators that both implementations use, under all settings. In addition, names that begin with `_backward_` are
# backward, names that end with `_update` are update, and names that begin with `Copy` are allreduce.
OPERATORS = {
    "forward": (
        *("Convolution", "BatchNorm", "Activation", "Pooling", "Flatten", "FullyConnected", "elemwise_add"),
        *("slice_axis", "_zeros"),  # padded channels (tuning)
        *("log_softmax", "pick", "_mul_scalar", "mean"),  # the loss
    ),
    "backward": ("SetValueOp", "_full", "zeros_like"),  # initial values: ones, and zero gradients
    "allreduce": (
        *("add_n", "broadcast_add", "ElementwiseSum"),  # used by scratch, by tuning and by Gluon's store
        "Concat",  # running statistics
    ),
    # Clipping by the norm.
    "update": ("square", "sum", "sqrt", "_plus_scalar", "_rdiv_scalar", "_minimum_scalar", "broadcast_mul"),
    # Free memory or a network; wake Python, which waits for an array such as the losses; change a layout for oneDNN.
    "other": ("DeleteVariable", "DeleteOperator", "WaitForVar", "Reorder", "Reorder2Default"),
}
PHASE = {operator: phase for phase, operators in OPERATORS.items() for operator in operators}
# A network that is not hybridized may use some of these operators itself, which their gradients reveal:
# {gradient: phases of the operators}. Sums of gradients then count as the network's additions.
OWN = {
    "_backward_broadcast_add": {"broadcast_add": "forward", "add_n": "backward"},
    "_backward_Concat": {"Concat": "forward"},
}


class Recorder:
    """Profiles some steps of a training run. The training loop issues each step inside `with recorder.step():`.

    The recorded steps follow a warm-up and lie within one epoch. The recorder waits for the engine before
    the first and after the last of them, which does not change the computed values. It writes the trace after the last
    step, and the picture, with the suffix .png, when it closes.
    """

    def __init__(
        self,
        file: str | Path | None,
        ctx: list[Context],
        about: str,
        total: int,
        steps_per_epoch: int,
        before: int = 0,
        steps: int = STEPS,
    ) -> None:
        """file: path of the trace; None: record nothing. about: title of the picture. total: number of steps of the
        whole run; before: how many of them are done already.

        Raises UsageError if the file is invalid, if MXNet's profiler does not support a context, or if the run has too
        few steps.
        """
        self.file = None if file is None else Path(file)
        self.about, self.issued, self.running = about, before, False
        self.trace: dict[str, Any] | None = None
        if self.file is None:
            return
        self.needed = steps + AROUND
        self.lanes = _lanes(ctx)
        if self.file.suffix == ".png" or self.file.is_dir() or not self.file.parent.is_dir():
            raise UsageError(f"profile={file}: must be a file such as profile.json in an existing folder")
        self.first = self._first_step(total, steps_per_epoch)

    def _first_step(self, total: int, steps_per_epoch: int) -> int:
        """The step at which recording starts: the earliest after the warm-up with enough steps left in its epoch."""
        if steps_per_epoch < self.needed:
            raise UsageError(
                f"profile={self.file}: an epoch has {steps_per_epoch} steps, and recording needs {self.needed}; use "
                "smaller batches or a larger limit"
            )
        for step in range(self.issued + WARM_UP, total - self.needed + 1):
            if step % steps_per_epoch + self.needed <= steps_per_epoch:
                return step
        raise UsageError(
            f"profile={self.file}: {total - self.issued} steps are left to train, and recording needs {self.needed} "
            f"steps of one epoch after a warm-up of {WARM_UP}; use more epochs or smaller batches"
        )

    def __enter__(self) -> Recorder:
        self.folder = tempfile.TemporaryDirectory() if self.file else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            _stop()
        if self.folder:
            self.folder.cleanup()
        if self.trace and self.file:
            checkpoint.write_whole(self.file.with_suffix(".png"), partial(draw, self.trace))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Issue one training step inside this context manager."""
        if not self.file or not self.folder:
            yield
            return
        raw = Path(self.folder.name) / "profile.json"
        if self.issued == self.first:
            _start(raw)
            self.running = True
        yield
        self.issued += 1
        if self.running and self.issued == self.first + self.needed:
            self.running = False
            _stop()
            self.trace = chrome_trace(_read_raw(raw), self.lanes, self.needed, self.about)
            checkpoint.write_whole(self.file, lambda file: file.write(json.dumps(self.trace).encode()))


def _lanes(ctx: list[Context]) -> dict[int, str]:
    """{lane number: name} of each context. MXNet's profiler has one lane per core of this process, and aborts if an
    operator runs on a context without a lane."""
    import mxnet as mx

    cores = len(os.sched_getaffinity(0))
    gpus = GPU_LANES if mx.runtime.Features().is_enabled("CUDA") else 0
    lanes = {c.device_id + (cores if c.device_type == "gpu" else 0): str(c) for c in ctx}
    if max(lanes) >= cores + gpus + HOST_LANES:
        raise UsageError(
            f"cannot profile {lanes[max(lanes)]}: on {cores} cores MXNet's profiler supports contexts up to "
            f"cpu({cores + gpus + HOST_LANES - 1}); use fewer devices"
        )
    return lanes


def _start(raw: Path) -> None:
    import mxnet as mx

    mx.nd.waitall()
    # aggregate_stats keeps the engine from merging operators into an "ImperativeBulk", which would hide their names.
    mx.profiler.set_config(
        filename=str(raw),
        profile_imperative=True,
        profile_symbolic=True,
        profile_api=False,
        profile_memory=False,
        continuous_dump=False,
        aggregate_stats=True,
    )
    mx.profiler.set_state("run")


def _stop() -> None:
    import mxnet as mx

    try:
        mx.nd.waitall()
    finally:
        mx.profiler.set_state("stop")
        mx.profiler.dump()


def _read_raw(path: Path) -> list[dict[str, Any]]:
    """Read the events of a profile. In all profiles of a process except the first, MXNet writes an extra comma."""
    text = path.read_text().replace('"traceEvents": [\n,', '"traceEvents": [', 1)
    return json.loads(text)["traceEvents"]


def phase(operator: str, own: Mapping[str, str] | None = None) -> str:
    """The phase of an operator, or of a bulk of operators, with this name; "other" if the name is unknown.

    own: {operator: phase} of operators that the network itself uses. All copies count as allreduce, even copies of
    shards to devices, because on CPU contexts they have the same name.
    """
    if SEPARATOR in operator:
        return "backward" if "_backward_" in operator else "forward"
    if own and operator in own:
        return own[operator]
    if operator.startswith("_backward_"):
        return "backward"
    if operator.endswith("_update"):
        return "update"
    return "allreduce" if operator.startswith("Copy") else PHASE.get(operator, "other")


def chrome_trace(raw: list[dict[str, Any]], lanes: dict[int, str], steps: int, about: str = "") -> dict[str, Any]:
    """Convert a profile to a Chrome trace (dict). Each lane is a process, and an event's category is its phase.

    raw: MXNet's traceEvents. lanes: {process: name of the context} of the training contexts. steps: the number
    recorded, including one before and one after those shown. A step ends with its last update on any context.
    Raises Error if the number of updates is not a multiple of steps.
    """
    marks = [e for e in raw if e["ph"] in ("B", "E") and e["cat"] == "operator"]
    spans = sorted(  # MXNet writes each end right after its beginning
        ((b["ts"], e["ts"], b["pid"], b["tid"], b["name"]) for b, e in zip(marks[::2], marks[1::2])),
    )
    operators = {name for *_, name in spans}
    own = {operator: phase for gradient in OWN.keys() & operators for operator, phase in OWN[gradient].items()}
    start = spans[0][0] if spans else 0
    processes = {process: i for i, process in enumerate(lanes)}
    threads: dict[tuple[int, int], int] = {}
    events: list[dict[str, Any]] = []
    updates: dict[int, list[float]] = {process: [] for process in lanes}
    for begin, end, process, thread, name in spans:
        if name.endswith("_update") and process in updates:
            updates[process].append(end - start)
        pid = processes.setdefault(process, len(processes))  # new for the host, if it does not train
        tid = threads.setdefault((process, thread), len([p for p, _ in threads if p == process]))
        span = {"ph": "X", "ts": begin - start, "dur": end - begin, "pid": pid, "tid": tid}
        events.append({"name": name, "cat": phase(name, own), **span})
    ends = _step_ends({lanes[process]: sorted(times) for process, times in updates.items()}, steps)
    for i, (begin, end) in enumerate(zip(ends, ends[1:-1]), 1):
        span = {"ph": "X", "ts": begin, "dur": end - begin, "pid": len(processes), "tid": 0}
        events.append({"name": f"step {i}", "cat": "step", **span})
    names = [lanes.get(process, "host") for process in processes] + ["steps"]
    titles = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in enumerate(names)
    ]
    return {
        "traceEvents": titles + events,
        "displayTimeUnit": "ms",
        "otherData": {"about": about, "contexts": list(lanes.values())},
    }


def _step_ends(updates: dict[str, list[float]], steps: int) -> list[float]:
    """The time at which each step ends: its last update. updates: {context: sorted times of its updates}."""
    ends = [0.0] * steps
    for context, times in updates.items():
        per_step = len(times) // steps
        if not times or len(times) % steps:
            raise Error(f"the profile is incomplete: {len(times)} updates on {context} in {steps} steps")
        ends = [max(end, times[(i + 1) * per_step - 1]) for i, end in enumerate(ends)]
    return ends


def read(file: str | Path) -> dict[str, Any]:
    """Read a trace that `Recorder` wrote. Raises Error for any other file."""
    try:
        trace = json.loads(Path(file).read_text())
        if not trace["otherData"]["contexts"] or not _steps(trace):
            raise ValueError("it has no contexts or steps")
        return trace
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Error(f"{file} is not a recorded timeline ({error}); record it again") from None


def summary(trace: dict[str, Any]) -> dict[str, Any]:
    """Seconds that each context spent in each phase during the recorded steps, as a JSON-serializable dict.

    {"window_s", "step_ms": [...], "contexts": {name: {phase: seconds, ..., "idle": seconds, "idle_share"}}, "unknown":
    operators without a phase, counted as "other"}. If operators overlap on a context, only the earliest counts.
    """
    steps = _steps(trace)
    window = steps[-1][1] - steps[0][0]
    contexts = {}
    for context, spans in lanes(trace).items():
        seconds = {phase: sum(end - begin for p, begin, end in spans if p == phase) / 1e6 for phase in PHASES}
        idle = window - sum(end - begin for _, begin, end in spans)
        contexts[context] = {**seconds, "idle": idle / 1e6, "idle_share": idle / window}
    unknown = {e["name"] for e in trace["traceEvents"] if e.get("cat") == "other"} - {*OPERATORS["other"]}
    return {
        "window_s": window / 1e6,
        "step_ms": [(end - begin) / 1e3 for begin, end in steps],
        "contexts": contexts,
        "unknown": sorted(unknown),
    }


def lanes(trace: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """{context: [(phase, begin, end), ...]} of the recorded steps, in microseconds, in order, without overlaps."""
    steps = _steps(trace)
    found: dict[str, list[tuple[str, float, float]]] = {}
    for pid, context in enumerate(trace["otherData"]["contexts"]):
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
    """Draw a trace as a PNG image: all recorded steps at the top, and the end of one step, enlarged, below.

    file: an open binary file or a path. note: a line below the title.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    steps, spans = _steps(trace), lanes(trace)
    shown = summary(trace)
    start = steps[0][0]
    figure = Figure(figsize=(12, 2.6 + 1.3 * len(spans)), layout="constrained")
    whole, part = figure.subplots(2, 1)
    for axes in (whole, part):
        for y, of_context in enumerate(spans.values()):
            axes.broken_barh([(0, (steps[-1][1] - start) / 1e3)], (y - 0.4, 0.8), color=COLORS["idle"], linewidth=0)
            for name in PHASES:
                bars = [((begin - start) / 1e3, (end - begin) / 1e3) for p, begin, end in of_context if p == name]
                axes.broken_barh(bars, (y - 0.4, 0.8), color=COLORS[name], linewidth=0)
        for _, end in steps[:-1]:
            axes.axvline((end - start) / 1e3, color="black", linewidth=0.8)
        axes.set_yticks(range(len(spans)), spans)
        axes.invert_yaxis()
    idle = [f"{context}\nidle {100 * seconds['idle_share']:.1f}%" for context, seconds in shown["contexts"].items()]
    whole.set_yticks(range(len(spans)), idle)
    whole.set_xlim(0, (steps[-1][1] - start) / 1e3)
    top = {"transform": whole.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": "small"}
    for i, (begin, end) in enumerate(steps, 1):
        whole.text(((begin + end) / 2 - start) / 1e3, 1.02, f"step {i}", **top)
    middle = (len(steps) - 1) // 2
    begin, end = steps[middle]
    part.set_xlim((end - 0.1 * (end - begin) - start) / 1e3, (end + 0.05 * (end - begin) - start) / 1e3)
    part.set_title(f"the end of step {middle + 1}, enlarged", fontsize="small")
    part.set_xlabel("ms")
    handles = [Patch(color=color, label=MEANING.get(name, name)) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncol=len(handles), frameon=False, fontsize="small")
    figure.suptitle(f"{trace['otherData']['about']}\n{note}", fontsize="medium")
    figure.savefig(file, format="png", dpi=120)
