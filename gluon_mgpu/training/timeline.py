"""What each context does during some training steps: MXNet's own profile of them, as a Chrome trace and as a picture.

`recorded` profiles steps of a training and leaves the trace, which chrome://tracing and Perfetto open; `summary` counts
seconds and idle shares from it; `draw` draws it, one lane a context. docs/engine.md has what the profile holds.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint

if TYPE_CHECKING:
    from mxnet import Context
    from mxnet.ndarray import NDArray

    from gluon_mgpu.training import loop

WARM_UP = 10  # steps before the recorded ones
STEPS = 5  # that are shown
AROUND = 2  # one more step is recorded before these and one after, so that the engine is as busy as within a run
HOST_LANES = 2  # MXNet's profile has one of pinned and one of shared host memory, after those of cores and GPUs
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
    "other": "other: memory freed, Python woken, layouts",
}
ONE_BY_ONE = "While recorded, imperative operators run one by one, not in bulks"
SEPARATOR = ","  # between the operators of a hybridized net's bulk, which the profile names together

# The operators of both implementations, under every setting of `Settings`. Whatever `_backward_` begins is backward,
# whatever `_update` ends is update, whatever `Copy` begins is allreduce.
OPERATORS = {
    "forward": (
        *("Convolution", "BatchNorm", "Activation", "Pooling", "Flatten", "FullyConnected", "elemwise_add"),
        *("slice_axis", "_zeros"),  # channels added to blocks, and taken away
        *("log_softmax", "pick", "_mul_scalar", "mean"),  # the loss
    ),
    "backward": ("SetValueOp", "_full", "zeros_like", "reset_arrays"),  # what it begins from: ones, and gradients of 0
    "allreduce": (
        *("add_n", "broadcast_add", "ElementwiseSum"),  # on CPU contexts; on GPUs scratch's, and that of Gluon's store
        "Concat",  # of running statistics
    ),
    "update": (
        *("square", "sum", "dot", "sqrt", "_plus_scalar", "_rdiv_scalar", "_minimum_scalar", "min", "_ones"),
        "broadcast_mul",  # these clip by the norm
    ),
    # Memory or a net is freed; Python waits for an array, such as the losses; oneDNN changes an array's layout.
    "other": ("DeleteVariable", "DeleteOperator", "WaitForVar", "Reorder", "Reorder2Default"),
}
PHASE = {operator: phase for phase, operators in OPERATORS.items() for operator in operators}
# Where a net that is not hybridized has such operators itself, their gradients show it: {gradient: phases of them}. Its
# additions are then these, and the sums of gradients, which have the same name, count with them; or it has no running
# statistics.
OWN = {
    "_backward_broadcast_add": {"broadcast_add": "forward", "add_n": "backward"},
    "_backward_Concat": {"Concat": "forward"},
}


@contextmanager
def recorded(
    file: str | Path | None,
    replicas: loop.Replicas,
    about: str,
    total: int,
    steps_an_epoch: int,
    before: int = 0,
    steps: int = STEPS,
) -> Iterator[None]:
    """While this is open, `replicas.train_batch` records `steps` steps of the training; file None records nothing.

    file: of the trace; the picture is left beside it as .png when this ends. replicas: those of either implementation.
    about: what is trained, for the picture. total: steps of the whole run, before: how many of them came before.
    The recorded steps follow a warm-up and lie in one epoch. The engine is waited for before the first and after the
    last of them; what is computed is the same. Raises UsageError for a file that cannot be, for contexts that MXNet's
    profiler has no lane for, and for a run without enough steps.
    """
    if file is None:
        yield
        return
    file, needed = Path(file), steps + AROUND
    lanes = _lanes(replicas.ctx)
    if file.suffix == ".png" or file.is_dir() or not file.parent.is_dir():
        raise UsageError(f"--profile {file}: give a file such as profile.json in a folder that is there")
    starts = range(before + WARM_UP, total - needed + 1)
    first = next((s for s in starts if s % steps_an_epoch + needed <= steps_an_epoch), None)
    if first is None:
        raise UsageError(
            f"--profile {file}: {total - before} steps to train, {steps_an_epoch} an epoch: {needed} of one epoch are "
            f"recorded, after {WARM_UP}; give more epochs, or a smaller batch"
        )
    train_batch, issued, running = replicas.train_batch, before, False
    trace: dict[str, Any] | None = None

    def recording_train_batch(*args: Any, **kwargs: Any) -> list[NDArray]:
        nonlocal issued, running, trace
        if issued == first:
            _start(raw)
            running = True
        losses = train_batch(*args, **kwargs)
        issued += 1
        if issued == first + needed:
            running = False
            _stop()
            trace = chrome_trace(_read_raw(raw), lanes, needed, about)
            checkpoint.write_whole(file, lambda f: f.write(json.dumps(trace).encode()))
        return losses

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "profile.json"
        replicas.train_batch = recording_train_batch  # type: ignore[method-assign]  # until this ends
        try:
            yield
        finally:
            replicas.train_batch = train_batch  # type: ignore[method-assign]
            if running:
                _stop()
    if trace:
        checkpoint.write_whole(file.with_suffix(".png"), lambda f: draw(trace, f))


def _lanes(ctx: list[Context]) -> dict[int, str]:
    """{MXNet's number: name} of each context. MXNet makes a lane for each core that this process may use, and ends the
    process at an operator of a context that has none."""
    import mxnet as mx

    cores = len(os.sched_getaffinity(0))
    gpus = GPU_LANES if mx.runtime.Features().is_enabled("CUDA") else 0
    lanes = {c.device_id + (cores if c.device_type == "gpu" else 0): str(c) for c in ctx}
    if max(lanes) >= cores + gpus + HOST_LANES:
        raise UsageError(
            f"a profile of {lanes[max(lanes)]}: on {cores} cores MXNet's profiler ends at "
            f"cpu({cores + gpus + HOST_LANES - 1}); give fewer contexts"
        )
    return lanes


def _start(raw: Path) -> None:
    import mxnet as mx

    mx.nd.waitall()
    # With aggregate_stats the engine puts no operators into an "ImperativeBulk", which would hide their names.
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
    """The events of a profile of MXNet's. From the second one of a process on, MXNet writes a comma too many."""
    text = path.read_text().replace('"traceEvents": [\n,', '"traceEvents": [', 1)
    return json.loads(text)["traceEvents"]


def phase(operator: str, own: Mapping[str, str] | None = None) -> str:
    """The phase of an operator, or of a hybridized net's bulk of them, by its name; "other" for an unknown one.

    own: phases of operators that are the net's own here, {operator: phase}. Copies are all counted as
    allreduce, those that bring a device its shard too: on CPU contexts they have one name.
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
    """A Chrome trace, as a dict for JSON, of MXNet's events: lanes are processes, the phase is an event's category.

    raw: MXNet's traceEvents. lanes: {process: name of the context} of those that train. steps: how many were recorded,
    the one before and the one after those shown too. A step ends where its last update does, on whichever context.
    Raises Error where the updates do not divide into so many steps.
    """
    marks = [e for e in raw if e["ph"] in ("B", "E") and e["cat"] == "operator"]
    spans = sorted(  # MXNet writes the end of an operator right after its beginning
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
        pid = processes.setdefault(process, len(processes))  # the host's, where that does not train
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
    """When each step ends: at the last of its updates. updates: {context: sorted times at which each was done}."""
    ends = [0.0] * steps
    for context, times in updates.items():
        a_step = len(times) // steps
        if not times or len(times) % steps:
            raise Error(f"the profile has {len(times)} updates on {context} in {steps} steps: it is not whole")
        ends = [max(end, times[(i + 1) * a_step - 1]) for i, end in enumerate(ends)]
    return ends


def read(file: str | Path) -> dict[str, Any]:
    """The trace that `recorded` left; raises Error for a file that is none."""
    try:
        trace = json.loads(Path(file).read_text())
        if not trace["otherData"]["contexts"] or not _steps(trace):
            raise ValueError("it has no contexts or steps")
        return trace
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Error(f"{file} is no recorded timeline ({error}): record it anew") from None


def summary(trace: dict[str, Any]) -> dict[str, Any]:
    """What a trace shows, as a dict for JSON: over the recorded steps, for each context the seconds in each phase.

    {"window_s", "step_ms": [...], "contexts": {name: {phase: seconds, ..., "idle": seconds, "idle_share"}}, "unknown":
    names of operators that are in no phase and so count as "other"}. Where operators overlap on a context, the one that
    began first counts.
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
    """{context: [(phase, begin, end), ...]} of the recorded steps, in microseconds, in order and without overlap."""
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
    """A trace as a PNG picture: all recorded steps, and below the end of one step larger. file: binary and open, or a
    path. note: a line below the title."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    steps, spans = _steps(trace), lanes(trace)
    shown = summary(trace)
    start = steps[0][0]
    figure = Figure(figsize=(12, 2.6 + 1.3 * len(spans)))
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
    part.set_title(f"where step {middle + 1} ends, enlarged", fontsize="small")
    part.set_xlabel("ms")
    handles = [Patch(color=color, label=MEANING.get(name, name)) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="lower center", ncol=len(handles), frameon=False, fontsize="small")
    figure.suptitle(f"{trace['otherData']['about']}\n{note}", fontsize="medium")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(file, format="png", dpi=120)
