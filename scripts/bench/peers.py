"""`peers`: compare with PyTorch on the same network, data, batches, arithmetic and cores, in turn.

Workers of `steps` train our networks and run the notebook's code; workers of `torch_peers` train PyTorch's networks.
Nothing here imports mxnet or torch into the calling process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, TITLE, Job, Run, ratios, spread
from bench.steps import Subject, one_thread
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import datasets

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Environment variables that change how PyTorch computes, besides the engine's settings.
TORCH_SETTINGS = ("TORCH", "PYTORCH_", "MKL_", "KMP_", "GLOO_")
TORCH = {"PyTorch, 2 threads": {"processes": 1, "threads": 2}, "DDP, 2 processes": {"processes": 2, "threads": 1}}
VARIANTS = {"": {}, ", channels_last": {"channels_last": True}, ", torch.compile": {"compiled": True}}
NOTEBOOK, PYTORCH, DDP = "notebook, 2 contexts", *TORCH
SCRATCH, HIGHLEVEL = "scratch, 2 contexts", "highlevel, 2 contexts"
LEARNERS = (PYTORCH, DDP, SCRATCH, HIGHLEVEL)

NOTES = """\
A step includes making the float32 batch from uint8 images in a shuffled order, forward, loss, backward, allreduce,
update, and reading the losses. It excludes startup, compiling and the first steps; for the notebook's code, which waits
for every step and reads no loss, also making the batches. DDP is DistributedDataParallel over gloo with
gradient_as_bucket_view, static_graph and the default buckets. peak MB: for DDP, the sum over both processes, which
counts shared pages twice. loss: the mean over the steps, which is the same for all."""


def run(
    model: Sequence[str] = tuple(TITLE),
    rounds: int = 5,
    steps: int = 100,
    accuracy: bool = False,
    epochs: int = 4,
    seed: int = 1,
) -> dict:
    """Measure all subjects of the models in turn; returns what `table` and `draw` show.

    steps: for LeNet, in each round. accuracy: also train LeNet on Fashion-MNIST for `epochs` epochs with PyTorch and
    our code, from the same parameters and in the order determined by the seed.
    Raises Error if PyTorch, a compiler for it, or the data is missing, or if a worker fails.
    """
    _check_torch()
    if accuracy:
        datasets.find("fashion-mnist") or datasets.fetch("fashion-mnist")
    result: dict[str, Any] = {"rounds": rounds, "models": {}}
    with tempfile.TemporaryDirectory() as compiled:
        for name in model:
            result["models"][name] = harness.measure(jobs(name, compiled, "time", steps=steps), rounds)
        if accuracy:
            every = jobs("lenet", compiled, "learn", epochs=epochs, seed=seed)
            runs = harness.measure({name: every[name] for name in LEARNERS}, 1)
            learned = {name: {what: values[0] for what, values in run.items()} for name, run in runs.items()}
            result["accuracy"] = {"epochs": epochs, "seed": seed, "runs": learned}
    return result


def jobs(model: str, compiled: str, mode: str, **arguments: int) -> dict[str, Job]:
    """Create {name: job} for all subjects. compiled: folder for the files of torch.compile. mode: "time" or "learn"."""
    notebook = [Subject("notebook", 2)] if model == "lenet" else []
    two = [Subject(impl, 2, model=model) for impl in IMPLS[model]]
    found = {str(subject): subject.job(mode, **arguments) for subject in notebook}
    for name, processes in TORCH.items():
        for variant, options in VARIANTS.items():
            subject = {"model": model, **processes, **options}
            env = _torch_environment(processes["threads"], Path(compiled, f"{model}, {name}"))
            found[name + variant] = Job("torch_peers", {"mode": mode, **subject, **arguments}, env, seconds=900)
    ours = [*two, *map(one_thread, two)]
    return {**found, **{str(subject): subject.job(mode, **arguments) for subject in ours}}


def _torch_environment(threads: int, folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    settings = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}  # a killed compiler leaves files there
    if threads > 1:  # as ours on one context; otherwise, a little other work on the cores makes it much slower
        settings["GOMP_SPINCOUNT"] = engine.SPINS
    return harness.environment(settings, without=(*harness.SETTINGS, *TORCH_SETTINGS))


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Error("PyTorch is not installed: run `make bench-peers` or `pip install torch`")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Error(f"torch.compile needs a C++ compiler, and {compiler} was not found: install g++ or set CXX")


def fastest_torch(runs: dict[str, Run]) -> tuple[str, list[float]]:
    """The fastest variant of PyTorch, and its time relative to highlevel, per round."""
    against = {name: ratios(run, runs[HIGHLEVEL]) for name, run in runs.items() if name.startswith((PYTORCH, DDP))}
    fastest = min(against, key=lambda name: median(against[name]))
    return fastest, against[fastest]


def table(result: dict) -> str:
    """Format, for each model, the subjects' times, ratios and memory; then the accuracies."""
    lines = [harness.machine_line(), NOTES]
    for model, runs in result["models"].items():
        rows = []
        for name, run in runs.items():
            notebook = {"x notebook": ratios(runs[NOTEBOOK], run)} if NOTEBOOK in runs else {}
            loss = {"loss": f"{run['loss'][0]:.4f}" if run["loss"][0] else ""}
            rows.append((name, BATCH_SIZE[model], run, {"x plain DDP": ratios(runs[DDP], run), **notebook, **loss}))
        title = f"{TITLE[model]}, batch {BATCH_SIZE[model]}, {result['rounds']} rounds"
        fastest, against = fastest_torch(runs)
        lines += ["", *harness.speed_table(title, rows)]
        lines.append(f"{fastest}, the fastest of PyTorch: {spread(against, 2)} times as long as {HIGHLEVEL}")
    if "accuracy" in result:
        rows = [["", "s/epoch", "test accuracy after each epoch"]]
        for name, run in result["accuracy"]["runs"].items():
            rows.append([name, f"{median(run['seconds']):.1f}", "  ".join(f"{a:.4f}" for a in run["accuracy"])])
        lines += [
            "",
            "LeNet on Fashion-MNIST, all from the same parameters and in the same order",
            *harness.table(rows),
        ]
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO) -> None:
    """Draw examples per second of each subject, one panel per model, as PNG. If test accuracy was measured, the last
    panel shows it by seconds of training."""
    from matplotlib.figure import Figure

    heights = [len(runs) for runs in result["models"].values()] + [9] * ("accuracy" in result)
    figure = Figure(figsize=(8, 0.9 + 0.42 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (model, runs) in zip(panels, result["models"].items()):
        rates = {name: [1000 * BATCH_SIZE[model] / ms for ms in run["step_ms"]] for name, run in runs.items()}
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
