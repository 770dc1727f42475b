"""`peers`: the same network, data, batches and arithmetic here and in PyTorch, on the same cores, in turn.

Workers of `steps` train ours and the notebook's code, workers of `torch_peers` PyTorch's networks. Nothing here imports
mxnet or torch into the calling process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Union

import numpy as np

from bench import harness
from bench import steps as ours
from bench.harness import BATCH_SIZE, TITLE, ratios, spread
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import datasets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SECONDS = 900
# Environment variables that change how PyTorch computes, besides the engine's settings.
TORCH_SETTINGS = ("TORCH", "PYTORCH_", "MKL_", "KMP_", "GLOO_")

NOTES = """\
A step: making the float32 batch from uint8 images in a shuffled order, forward, loss, backward, allreduce, update, and
reading the losses. Not included: the start, compiling, the first steps; and for the notebook's code, which waits for
every step and reads no loss, making the batches. DDP: DistributedDataParallel over gloo with gradient_as_bucket_view,
static_graph, and the default buckets. peak MB: of DDP the sum over both processes, which counts shared pages twice.
compile s: in the first round; later rounds find the compiled code. loss: the mean over the steps."""


class Torch(NamedTuple):
    """One PyTorch network to measure."""

    model: str
    processes: int  # several: DistributedDataParallel
    threads: int  # of each process
    channels_last: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        name = f"DDP, {self.processes} processes" if self.processes > 1 else f"PyTorch, {self.threads} threads"
        return name + ", channels_last" * self.channels_last + ", torch.compile" * self.compiled


Subject = Union[ours.Subject, Torch]
NOTEBOOK, PYTORCH, DDP = "notebook, 2 contexts", "PyTorch, 2 threads", "DDP, 2 processes"
SCRATCH, HIGHLEVEL = "scratch, 2 contexts", "highlevel, 2 contexts"
LEARNERS = (NOTEBOOK, PYTORCH, DDP, SCRATCH, HIGHLEVEL)


def subjects(model: str) -> list[Subject]:
    """What is measured for a model."""
    found: list[Subject] = [ours.Subject("notebook", 2)] if model == "lenet" else []
    for plain in (Torch(model, 1, 2), Torch(model, 2, 1)):
        found += [plain, plain._replace(channels_last=True), plain._replace(compiled=True)]
    two = [ours.Subject(impl, 2, model=model) for impl in harness.IMPLS[model]]
    return [*found, *two, *(ours.one_thread(subject._replace(contexts=1)) for subject in two)]


def run(
    models: Sequence[str] = tuple(TITLE),
    rounds: int = 5,
    steps: int = 100,
    accuracy: bool = False,
    epochs: int = 4,
    seed: int = 1,
) -> dict:
    """Measure all subjects of each model in turn; returns what `table` and `draw` show.

    steps: of LeNet, in each round. accuracy: also train LeNet on Fashion-MNIST for some epochs with the notebook's
    code, PyTorch and ours, from the same parameters and in the order that the seed gives.
    Raises Error if PyTorch, a compiler for it, or the data is missing, or if a worker fails.
    """
    _check_torch()
    if accuracy:
        datasets.find("fashion-mnist") or datasets.fetch("fashion-mnist")
    result: dict[str, Any] = {"rounds": rounds, "models": {}}
    with tempfile.TemporaryDirectory() as compiled:
        for model in models:

            def measure(subject: Subject) -> dict:
                return start(subject, "time", Path(compiled), steps=steps)

            found = harness.in_turn(subjects(model), rounds, measure)
            result["models"][model] = {str(subject): runs for subject, runs in found.items()}
        if accuracy:
            learners = [subject for subject in subjects("lenet") if str(subject) in LEARNERS]
            job = {"epochs": epochs, "seed": seed}
            learned = harness.in_turn(learners, 1, lambda subject: start(subject, "learn", Path(compiled), **job))
            result["accuracy"] = {**job, "runs": {str(subject): run for subject, (run,) in learned.items()}}
    return result


def start(subject: Subject, mode: str, compiled: Path, **job: int) -> dict:
    """What a worker returns for a subject. mode: "time" or "learn". compiled: a folder for what torch.compile makes."""
    if isinstance(subject, ours.Subject):
        return ours.start(subject, mode, **job)
    env = harness.environment(without=(*harness.SETTINGS, *TORCH_SETTINGS))
    env["GLOO_SOCKET_IFNAME"] = "lo"
    if subject.compiled:  # compiled code, and what a compiler leaves that is killed
        folder = compiled / f"{subject.model}-{subject.processes}"
        folder.mkdir(exist_ok=True)
        env["TMPDIR"] = str(folder)
    if subject.threads > 1:  # as ours on one context; else a little other work on the cores slows it several times
        env["GOMP_SPINCOUNT"] = engine.SPINS
    job = {"mode": mode, "subject": subject, **job}
    return harness.worker(str(subject), "torch_peers", job, env=env, seconds=SECONDS)


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Error("PyTorch is not installed: run `make bench-peers` or `pip install torch`")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Error(f"torch.compile needs a C++ compiler, and {compiler} was not found: install g++ or set CXX")


def fastest_torch(runs: dict[str, list[dict]]) -> tuple[str, list[float]]:
    """The variant of PyTorch that is fastest relative to highlevel, and how many times as long it takes, per round."""
    ours = step_ms(runs[HIGHLEVEL])
    against = {name: ratios(step_ms(of_it), ours) for name, of_it in runs.items() if name.startswith((PYTORCH, DDP))}
    fastest = min(against, key=lambda name: median(against[name]))
    return fastest, against[fastest]


def step_ms(runs: list[dict]) -> list[float]:
    return [run["step_ms"] for run in runs]


def table(result: dict) -> str:
    """Lines for a terminal: for each model, subjects with their times, ratios and memory; then what was learned."""
    lines = [harness.machine_line(), NOTES]
    for model, runs in result["models"].items():
        lines += ["", *_model_table(model, runs, result["rounds"])]
    if "accuracy" in result:
        learned = result["accuracy"]
        rows = [["", "s/epoch", "test accuracy after each epoch"]]
        for name, run in learned["runs"].items():
            rows.append([name, f"{median(run['seconds']):.1f}", "  ".join(f"{a:.4f}" for a in run["accuracy"])])
        title = f"LeNet on Fashion-MNIST, all from the same parameters and in the order of seed {learned['seed']}"
        lines += ["", title, *harness.table(rows)]
    return "\n".join(lines)


def _model_table(model: str, runs: dict[str, list[dict]], rounds: int) -> list[str]:
    rows = [["", "ms/step", "examples/s", "x plain DDP", "x notebook", "peak MB", "compile s", "loss"]]
    for name, of_it in runs.items():
        ms, first = step_ms(of_it), of_it[0]
        row = [name, spread(ms, 1), f"{1000 * BATCH_SIZE[model] / median(ms):.0f}"]
        row += [spread(ratios(step_ms(runs[other]), ms), 2) if other in runs else "" for other in (DDP, NOTEBOOK)]
        row.append(f"{median(run['peak_mb'] for run in of_it):.0f}")
        row.append(f"{first['compile_s']:.1f}" if name.endswith("torch.compile") else "")
        row.append(f"{first['loss']:.4f}" if first["loss"] else "")
        rows.append(row)
    fastest, times_as_long = fastest_torch(runs)
    return [
        f"{TITLE[model]}, batch {BATCH_SIZE[model]}, SGD, medians of {rounds} rounds (min-max)",
        *harness.table(rows),
        f"{fastest}, the fastest of PyTorch: {spread(times_as_long, 2)} times as long as {HIGHLEVEL}",
    ]


def draw(result: dict, file: BinaryIO) -> None:
    """Examples per second of each subject, one panel per model below each other; below them test accuracy by seconds of
    training, if it was measured. PNG."""
    from matplotlib.figure import Figure

    heights = [len(runs) for runs in result["models"].values()] + [9] * ("accuracy" in result)
    figure = Figure(figsize=(8, 0.9 + 0.42 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (model, runs) in zip(panels, result["models"].items()):
        rates = {name: [1000 * BATCH_SIZE[model] / ms for ms in step_ms(of_it)] for name, of_it in runs.items()}
        harness.bars(axes, rates, _color)
        axes.set_title(f"{TITLE[model]}, batch {BATCH_SIZE[model]}: examples/s, median of {result['rounds']} rounds")
    if "accuracy" in result:
        _draw_accuracy(panels[-1], result["accuracy"])
    figure.savefig(file, format="png", dpi=120)


def _draw_accuracy(axes: Axes, learned: dict) -> None:
    for (name, run), marker in zip(learned["runs"].items(), "osv^D"):
        line = "-" if name in (DDP, HIGHLEVEL) else "--"
        axes.plot(np.cumsum(run["seconds"]), run["accuracy"], line, marker=marker, color=_color(name), label=name)
    axes.set(xlabel="seconds of training", ylabel="test accuracy", xlim=(0, None))
    axes.set_title(f"LeNet on Fashion-MNIST, after each of {learned['epochs']} epochs")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _color(name: str) -> str:
    if name == NOTEBOOK:
        return "0.6"
    return "tab:blue" if name.startswith(("scratch", "highlevel")) else "tab:orange"
