"""Compare this project with PyTorch, in one process and in two, on the same network, data and batches.

Workers of `steps` train this project's networks and run the notebook's code; workers of `torch_peers` train PyTorch's
networks. Nothing here imports mxnet or torch into the calling process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import BinaryIO

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, TITLE, Job, ratios, spread
from bench.steps import Subject, one_thread
from gluon_mgpu.runtime import engine, subprocesses
from gluon_mgpu.runtime.errors import Error

TORCH = {"PyTorch, 2 threads": {"processes": 1, "threads": 2}, "DDP, 2 processes": {"processes": 2, "threads": 1}}
VARIANTS = {"": {}, ", channels_last": {"channels_last": True}, ", torch.compile": {"compiled": True}}
NOTEBOOK, PYTORCH, DDP = "notebook, 2 contexts", *TORCH
HIGHLEVEL = "highlevel, 2 contexts"
COLORS = {
    "notebook": "0.6",
    "PyTorch": "tab:orange",
    "DDP": "tab:orange",
    "scratch": "tab:blue",
    "highlevel": "tab:blue",
}

# For each library, a program that prints the instruction sets that the library uses, as "isa:NAME".
ISA = {
    "oneDNN in MXNet": "import gluon_mgpu; from mxnet import nd; nd.FullyConnected(nd.ones((8, 8)), nd.ones((8, 8)), "
    "no_bias=True, num_hidden=8).wait_to_read()",
    "PyTorch": "import torch; print('isa:' + torch.backends.cpu.get_cpu_capability())",
}

NOTES = """\
A step includes making the float32 batch from uint8 images in a shuffled order, the forward pass, the loss, the
backward pass, allreduce, the update, and reading the losses. It excludes startup, compiling and the first steps; for
the notebook's code, which waits for every step and reads no loss, it also excludes making the batches. DDP is
DistributedDataParallel over gloo with gradient_as_bucket_view, static_graph and the default buckets. peak MB: for DDP,
the sum over both processes, which counts shared pages twice. loss: the mean over the steps, which is the same in all
rows that show it."""


def run(model: Sequence[str] = tuple(TITLE), rounds: int = 5, steps: int = 100) -> dict:
    """Measure all subjects of the models in turn. Returns the input of `table` and `draw`.

    steps: number of LeNet steps per round. Raises Error if PyTorch is missing, if the C++ compiler that
    torch.compile needs is missing, or if a worker fails.
    """
    _check_torch()
    with tempfile.TemporaryDirectory() as compiled:
        models = {name: harness.measure(jobs(name, compiled, steps), rounds) for name in model}
    return {"rounds": rounds, "instruction_sets": {name: _isa(name) for name in ISA}, "models": models}


def _isa(name: str) -> str:
    """The instruction sets that a library reports to use on this processor."""
    env = harness.environment({"DNNL_VERBOSE": "1"})
    finished = subprocesses.run([sys.executable, "-c", ISA[name]], env=env, seconds=120)
    subprocesses.check(name, finished)
    found = re.search(r"isa:(.+)", finished.out)
    return found[1] if found else "unknown"


def jobs(model: str, compiled: str, steps: int) -> dict[str, Job]:
    """Create {name: job} for all subjects. compiled: folder for the files of torch.compile."""
    found = {NOTEBOOK: Subject("notebook", 2).job(steps)} if model == "lenet" else {}
    for name, processes in TORCH.items():
        for variant, options in VARIANTS.items():
            arguments = {"model": model, "steps": steps, **processes, **options}
            folder = Path(compiled, f"{model}-{processes['processes']}")  # torch.compile cannot handle spaces in paths
            env = _torch_environment(processes["threads"], folder)
            found[name + variant] = Job("torch_peers", arguments, env, seconds=900)
    two = [Subject(impl, 2, model=model) for impl in IMPLS[model]]
    others = [Subject("highlevel", contexts, model=model) for contexts in (1, 8)]
    return {**found, **{str(subject): subject.job(steps) for subject in (*two, *map(one_thread, two), *others)}}


def _torch_environment(threads: int, folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    settings = {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}  # a killed compiler leaves files in TMPDIR
    if threads > 1:  # as `engine` does for one context; without it, other programs slow PyTorch down a lot
        settings["GOMP_SPINCOUNT"] = engine.SPINS
    return harness.environment(settings)


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Error("PyTorch is not installed: run `make bench-peers` or `pip install torch`")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Error(f"torch.compile needs a C++ compiler, and {compiler} was not found: install g++ or set CXX")


def table(result: dict) -> str:
    """Format each model's times, ratios and memory use, and compare HIGHLEVEL with the fastest PyTorch variant."""
    used = "; ".join(f"{name} uses {isa}" for name, isa in result["instruction_sets"].items())
    lines = [harness.machine_line(), used, NOTES]
    for model, runs in result["models"].items():
        rows = []
        for name, run in runs.items():
            notebook = {"x notebook": ratios(runs[NOTEBOOK], run)} if NOTEBOOK in runs else {}
            loss = {"loss": f"{run['loss'][0]:.4f}" if run["loss"][0] else ""}
            rows.append((name, BATCH_SIZE[model], run, {"x plain DDP": ratios(runs[DDP], run), **notebook, **loss}))
        title = f"{TITLE[model]}, batch {BATCH_SIZE[model]}, {result['rounds']} rounds"
        against = {name: ratios(run, runs[HIGHLEVEL]) for name, run in runs.items() if name.startswith((PYTORCH, DDP))}
        fastest = min(against, key=lambda name: median(against[name]))
        lines += ["", *harness.speed_table(title, rows)]
        lines.append(f"{fastest}, the fastest PyTorch run: {spread(against[fastest], 2)} times as long as {HIGHLEVEL}")
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
        bars = axes.barh([*runs], middle, xerr=ranges, color=[COLORS[name.split(",")[0]] for name in runs])
        axes.bar_label(bars, [harness.three_digits(rate) for rate in middle], padding=5)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_title(f"{TITLE[model]}, batch {BATCH_SIZE[model]}: examples/s, median of {result['rounds']} rounds")
    figure.savefig(file, format="png", dpi=120)
