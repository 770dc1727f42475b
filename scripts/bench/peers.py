"""Compare this project with PyTorch, in one process and in two, on the same network, data and batches.

Workers of `steps` train this project's networks and run the notebook's code; workers of `torch_peers` train PyTorch's
networks. Nothing here imports mxnet or torch into the calling process.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import BinaryIO

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, TITLE, Job, ratios, spread
from bench.steps import Subject
from gluon_mgpu.compat import startup
from gluon_mgpu.support.errors import Error

TORCH = {"PyTorch, 2 threads": {"processes": 1, "threads": 2}, "DDP, 2 processes": {"processes": 2, "threads": 1}}
VARIANTS = {"": {}, ", channels_last": {"channels_last": True}, ", torch.compile": {"compiled": True}}
NOTEBOOK, PYTORCH, DDP = "notebook, 2 contexts", *TORCH
COLORS = {"notebook": "0.6", "PyTorch": "tab:orange", "DDP": "tab:orange"}

NOTES = """\
A step includes making the float32 batch from uint8 images in a shuffled order, the forward pass, the loss, the
backward pass, allreduce, the update, and reading the losses. It excludes startup, compiling and the first steps; for
the notebook's code, which waits for every step and reads no loss, it also excludes making the batches. DDP is
DistributedDataParallel over gloo with gradient_as_bucket_view, static_graph and the default buckets. peak MB: for DDP,
the sum over both processes, which counts shared pages twice. loss: the mean over the steps, which is the same in all
rows that show it."""


def run(model: Sequence[str], rounds: int, steps: int) -> dict:
    """Measure all subjects of the models in turn. Returns the input of `table` and `draw`.

    steps: number of LeNet steps per round. Raises Error if PyTorch is missing, if the C++ compiler that
    torch.compile needs is missing, or if a worker fails.
    """
    if importlib.util.find_spec("torch") is None:
        raise Error("PyTorch is not installed: run `make torch`")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Error(f"torch.compile needs a C++ compiler, and {compiler} was not found: install g++ or set CXX")
    with tempfile.TemporaryDirectory() as compiled:
        models = {name: harness.measure(jobs(name, compiled, steps), rounds) for name in model}
    return {"rounds": rounds, "models": models}


def jobs(model: str, compiled: str, steps: int) -> dict[str, Job]:
    """Create {name: job} for all subjects. compiled: folder for the files of torch.compile."""
    by_name = {NOTEBOOK: Subject("notebook", 2).job(steps)} if model == "lenet" else {}
    for name, processes in TORCH.items():
        for variant, options in VARIANTS.items():
            arguments = {"model": model, "steps": steps, **processes, **options}
            folder = Path(compiled, f"{model}-{processes['processes']}")  # torch.compile cannot handle spaces in paths
            env = _torch_environment(processes["threads"], folder)
            by_name[name + variant] = Job("torch_peers", arguments, env)
    ours = [Subject(impl, 2, model) for impl in IMPLS[model]]
    ours += [Subject(impl, 1, model, one_thread=True) for impl in IMPLS[model]]
    return {**by_name, **{str(subject): subject.job(steps) for subject in ours}}


def _torch_environment(threads: int, folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    settings = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}  # a killed compiler leaves files in TMPDIR
    if threads > 1:  # as `engine` does for one context; without it, other programs slow PyTorch down a lot
        settings["GOMP_SPINCOUNT"] = startup.SPINS
    return harness.environment(settings)


def table(result: dict) -> str:
    """Format each model's times, ratios and memory use, and compare highlevel with the fastest PyTorch variant."""
    lines = [harness.machine_line(), NOTES]
    for model, runs in result["models"].items():
        rows = []
        for name, run in runs.items():
            notebook = {"x notebook": ratios(runs[NOTEBOOK], run)} if NOTEBOOK in runs else {}
            loss = {"loss": f"{run['loss'][0]:.4f}" if run["loss"][0] else ""}
            rows.append((name, BATCH_SIZE[model], run, {"x plain DDP": ratios(runs[DDP], run), **notebook, **loss}))
        title = f"{TITLE[model]}, batch {BATCH_SIZE[model]}, {result['rounds']} rounds"
        lines += ["", *harness.speed_table(title, rows)]
        fastest = min(
            (name for name in runs if name.startswith((PYTORCH, DDP))), key=lambda n: median(runs[n]["step_ms"])
        )
        for impl in IMPLS[model]:
            against = spread(ratios(runs[fastest], runs[f"{impl}, 2 contexts"]), 2)
            lines.append(f"{fastest}, the fastest PyTorch run: {against} times as long as {impl}")
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO) -> None:
    """Draw each subject's examples per second as PNG, with one panel per model. Lines: from minimum to maximum."""
    from matplotlib.figure import Figure

    heights = [len(runs) for runs in result["models"].values()]
    figure = Figure(figsize=(8, 0.9 + 0.42 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (model, runs) in zip(panels, result["models"].items()):
        rates = np.array([1000 * BATCH_SIZE[model] / np.array(run["step_ms"]) for run in runs.values()])
        middle = np.median(rates, axis=1)
        ranges = middle - rates.min(axis=1), rates.max(axis=1) - middle
        colors = [COLORS.get(name.split(",")[0], "tab:blue") for name in runs]
        bars = axes.barh([*runs], middle, xerr=ranges, color=colors)
        axes.bar_label(bars, [f"{rate:.0f}" for rate in middle], padding=5)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_title(f"{TITLE[model]}, batch {BATCH_SIZE[model]}: examples/s, median of {result['rounds']} rounds")
    figure.savefig(file, format="png", dpi=120)
