"""The same network, data, batch and arithmetic here and in PyTorch, on the same cores: separate processes, in turn.

A worker of ours, `python -m bench.peers SUBJECT JOB`, trains one network; PyTorch's are in `torch_peers`.
SUBJECT and JOB are JSON, and so is what they print. Nothing here imports mxnet or torch into the calling process.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Optional

import numpy as np
from tqdm import tqdm

from bench import machine
from bench.steps import BATCH_SIZE, STEPS_PER_STEP, WARM_UP_STEPS
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import datasets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from mxnet.ndarray import NDArray

TITLE = {"lenet": "LeNet", "resnet18": "ResNet-18"}
LR = {"lenet": 0.2, "resnet18": 0.025}  # the recipes': ResNet-18's is 0.1 for a batch of 256
WORKER_SECONDS = 900
Train = Callable[[np.ndarray], tuple[Optional[float], float]]  # as `work` takes it
# Of the environment, what changes how PyTorch computes, beside the engine's settings.
TORCH_SETTINGS = ("TORCH", "PYTORCH_", "MKL_", "KMP_", "DNNL_", "ONEDNN_", "GLOO_")

NOTES = """\
In a step: making the float32 batch of uint8 images, in a shuffled order; forward; loss; backward; allreduce; update.
Ours read the loss of every step, up to 16 steps behind; PyTorch's are read at the end. Not in it: the start, compiling,
the first steps; and of the notebook's code, which waits for every step and reads no loss, making the batches.
DDP: DistributedDataParallel over gloo, gradient_as_bucket_view, static_graph, buckets of 25 MB as by default.
Peak MB: of the process; of DDP the sum, in which each counts the pages that both share. Compile s: in the first round;
later rounds find it done. Loss: the mean over the steps; batch normalization sees the examples of a part: 32, or 64."""


class Subject(NamedTuple):
    """One thing to measure, in a process of its own, or in several."""

    name: str
    impl: str  # "notebook", "scratch", "highlevel" or "pytorch"
    parts: int  # CPU contexts; PyTorch's processes
    threads: int = 1  # of each part
    channels_last: bool = False
    compiled: bool = False


NOTEBOOK = "notebook's code, 2 contexts"
PYTORCH, DDP = "PyTorch, 2 threads", "DDP, 2 processes"
SCRATCH, HIGHLEVEL = "scratch, 2 contexts", "highlevel, 2 contexts"
SCRATCH_ALONE, HIGHLEVEL_ALONE = "scratch, 1 context, 1 thread", "highlevel, 1 context, 1 thread"


def _variants(name: str, parts: int, threads: int) -> tuple[Subject, ...]:
    plain = Subject(name, "pytorch", parts, threads)
    return (
        plain,
        plain._replace(name=f"{name}, channels_last", channels_last=True),
        plain._replace(name=f"{name}, torch.compile", compiled=True),
    )


PYTORCH_VARIANTS, DDP_VARIANTS = _variants(PYTORCH, 1, 2), _variants(DDP, 2, 1)
SUBJECTS = {
    "lenet": (
        Subject(NOTEBOOK, "notebook", 2),
        *PYTORCH_VARIANTS,
        *DDP_VARIANTS,
        Subject(SCRATCH, "scratch", 2),
        Subject(HIGHLEVEL, "highlevel", 2),
        Subject(SCRATCH_ALONE, "scratch", 1),
        Subject(HIGHLEVEL_ALONE, "highlevel", 1),
    ),
    "resnet18": (
        *PYTORCH_VARIANTS,
        *DDP_VARIANTS,
        Subject(HIGHLEVEL, "highlevel", 2),
        Subject(HIGHLEVEL_ALONE, "highlevel", 1),
    ),
}
LEARNERS = tuple(s for s in SUBJECTS["lenet"] if s.name in (NOTEBOOK, PYTORCH, DDP, SCRATCH, HIGHLEVEL))


def run(
    models: Sequence[str] = tuple(TITLE),
    rounds: int = 5,
    steps: int = 100,
    accuracy: bool = False,
    epochs: int = 4,
    seed: int = 1,
) -> dict:
    """Measure all subjects of each model in turn, `rounds` times: a dict for `table`, `draw` and JSON.

    steps: of LeNet, in each round; ResNet-18's are a tenth. accuracy: train LeNet on Fashion-MNIST, too, for so many
    epochs, with the notebook's code, PyTorch and ours, from the parameters and in the order that the seed gives.
    Raises Error where PyTorch, a compiler for it, or the data is missing, where a worker fails, and where it takes
    longer than WORKER_SECONDS.
    """
    _check_torch()
    if accuracy:
        datasets.find("fashion-mnist") or datasets.fetch("fashion-mnist")
    result: dict = {"rounds": rounds, "models": {}}
    work = rounds * sum(len(SUBJECTS[model]) for model in models) + accuracy * len(LEARNERS)
    bar = tqdm(total=work, unit="run", leave=False, disable=not sys.stderr.isatty())
    with bar, tempfile.TemporaryDirectory() as compiled:

        def measured(subject: Subject, job: dict) -> dict:
            bar.set_description(f"{TITLE[job['model']]}, {subject.name}")
            found = in_own_processes(subject, job, Path(compiled) / f"{job['model']}-{subject.parts}")
            bar.update()
            return found

        for model in models:
            job = step_job(model, steps)
            runs: dict[str, list[dict]] = {subject.name: [] for subject in SUBJECTS[model]}
            for _ in range(rounds):
                for subject in SUBJECTS[model]:
                    runs[subject.name].append(_step(job, subject, measured(subject, job)))
            result["models"][model] = {**job, "runs": runs, "goals": goals(model, runs)}
        if accuracy:
            job = accuracy_job(epochs, seed)
            result["accuracy"] = {**job, "runs": {s.name: measured(s, job) for s in LEARNERS}}
    return result


def step_job(model: str, steps: int) -> dict:
    """What a worker does to be timed: some first steps, then `steps` of LeNet or a tenth of ResNet-18."""
    size, warm_up = BATCH_SIZE[model], WARM_UP_STEPS[model]
    steps = max(5, round(steps * STEPS_PER_STEP[model]))
    job = {"model": model, "batch_size": size, "lr": LR[model], "dataset": "synthetic", "seed": 0}
    return {**job, "limit": max(steps, warm_up) * size, "warm_up": warm_up, "steps": steps, "epochs": 0}


def accuracy_job(epochs: int, seed: int) -> dict:
    """What a worker does to show what it learns: whole epochs, and the test accuracy after each."""
    job = {"model": "lenet", "batch_size": BATCH_SIZE["lenet"], "lr": LR["lenet"], "dataset": "fashion-mnist"}
    return {**job, "seed": seed, "limit": None, "warm_up": 0, "steps": 0, "epochs": epochs}


def _step(job: dict, subject: Subject, measured: dict) -> dict:
    """{"step_ms", "peak_mb", "loss", "compile_s"} of what `in_own_processes` gives. compile_s: by how much the first
    steps took longer than as many later ones; None where nothing is compiled."""
    step = measured["seconds"][0] / job["steps"]
    compile_s = max(0.0, measured["warm_up_seconds"] - job["warm_up"] * step) if subject.compiled else None
    return {
        "step_ms": 1000 * step,
        "peak_mb": measured["peak_mb"],
        "loss": measured["losses"][0],
        "compile_s": compile_s,
    }


def goals(model: str, runs: dict[str, list[dict]]) -> list[dict]:
    """What was to be reached, and the ratios of each round: a list of {"goal", "ratios", "least"}.

    runs: {subject's name: [what `_step` gives, of each round]}. least: what the median is to be; None: no goal.
    """

    def against(name: str, other: str, least: float | None, what: str | None = None) -> dict:
        return {"goal": f"{name}, against {what or other}", "ratios": ratios(runs[other], runs[name]), "least": least}

    def against_all(what: str, variants: Sequence[Subject]) -> dict:
        closest = min((s.name for s in variants), key=lambda other: median(ratios(runs[other], runs[HIGHLEVEL])))
        return against(HIGHLEVEL, closest, 1, f"{what}, the closest {closest}")

    if model == "lenet":
        found = [
            against(HIGHLEVEL, DDP, 1.3),
            against_all("every DDP", DDP_VARIANTS),
            against(HIGHLEVEL, PYTORCH_VARIANTS[-1].name, None),
            against(SCRATCH, HIGHLEVEL, 0.95),
        ]
    else:
        everything = (*PYTORCH_VARIANTS, *DDP_VARIANTS)
        found = [against(HIGHLEVEL, DDP, 1.15), against_all("all of PyTorch", everything)]
    for two, one in ((SCRATCH, SCRATCH_ALONE), (HIGHLEVEL, HIGHLEVEL_ALONE)):
        if two in runs:
            halves = [ratio / 2 for ratio in ratios(runs[one], runs[two])]
            found.append({"goal": f"efficiency: {two}, against {one}, / 2", "ratios": halves, "least": 0.95})
    return found


def ratios(slow: list[dict], fast: list[dict]) -> list[float]:
    """How many times as long the one took as the other, in each round."""
    return [a["step_ms"] / b["step_ms"] for a, b in zip(slow, fast)]


def table(result: dict) -> str:
    """Lines for a terminal: for each model, subjects with ms a step, examples/s, ratios, memory; then the goals; then
    what was learned."""
    lines = []
    for model, measured in result["models"].items():
        size, runs = measured["batch_size"], measured["runs"]
        lines += [
            f"{TITLE[model]}, batch {size}, SGD, medians of {result['rounds']} rounds of {measured['steps']} steps "
            f"(min-max); {machine.line()}",
            f"{'':36}{'ms/step':>22}{'examples/s':>12}{'x plain DDP':>19}{'x notebook':>19}{'peak MB':>9}"
            f"{'compile s':>11}{'loss':>8}",
        ]
        for name, of_it in runs.items():
            ms = [run["step_ms"] for run in of_it]
            against = [_spread(ratios(runs[other], of_it), 2) if other in runs else "" for other in (DDP, NOTEBOOK)]
            compiling, loss = of_it[0]["compile_s"], of_it[0]["loss"]
            lines.append(
                f"{name:36}{_spread(ms, 1):>22}{1000 * size / median(ms):12.0f}{against[0]:>19}{against[1]:>19}"
                f"{median(run['peak_mb'] for run in of_it):9.0f}"
                f"{'' if compiling is None else f'{compiling:.1f}':>11}{'' if loss is None else f'{loss:.4f}':>8}"
            )
        lines += [*_goal_lines(measured["goals"]), ""]
    lines.append(NOTES)
    if "accuracy" in result:
        lines += ["", *_accuracy_lines(result["accuracy"])]
    return "\n".join(lines)


def _goal_lines(found: list[dict]) -> list[str]:
    lines = []
    for goal in found:
        line = f"{goal['goal']}: {_spread(goal['ratios'], 2)}"
        if goal["least"] is not None:
            line += f"; goal {goal['least']}: {'reached' if median(goal['ratios']) >= goal['least'] else 'not reached'}"
        lines.append(line)
    return lines


def _accuracy_lines(learned: dict) -> list[str]:
    lines = [
        f"LeNet on Fashion-MNIST, batch {learned['batch_size']}, all from the parameters and in the order that seed "
        f"{learned['seed']} gives; {machine.line()}",
        f"{'':36}s/epoch  test accuracy after each epoch",
    ]
    for name, run in learned["runs"].items():
        shown = "  ".join(f"{accuracy:.4f}" for accuracy in run["accuracy"])
        lines.append(f"{name:36}{median(run['seconds']):7.1f}  {shown}")
    return lines


def _spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """Examples a second of each subject as bars, from the slowest round to the fastest a line, a column a model; beside
    them, where it was asked for, test accuracy by seconds of training. PNG; file: binary and open, or a path."""
    from matplotlib.figure import Figure

    panels = [*result["models"], *(["accuracy"] if "accuracy" in result else [])]
    figure = Figure(figsize=(8 * len(panels), 5.5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        (_draw_accuracy if panel == "accuracy" else partial(_draw_speed, panel))(axes, result)
    figure.savefig(file, format="png", dpi=100)


def _draw_speed(model: str, axes: Axes, result: dict) -> None:
    measured = result["models"][model]
    runs, size = measured["runs"], measured["batch_size"]
    for i, (name, of_it) in enumerate(runs.items()):
        rates = [1000 * size / run["step_ms"] for run in of_it]
        axes.barh(i, median(rates), color=_color(name))
        axes.plot([min(rates), max(rates)], [i, i], color="black", linewidth=1.5)
        than_ddp = median(ratios(runs[DDP], of_it))
        axes.annotate(
            f"{median(rates):.0f}, {than_ddp:.2f} x", (max(rates), i), (5, 0), textcoords="offset points", va="center"
        )
    axes.set(yticks=range(len(runs)), yticklabels=runs, xlabel="examples/s, and times as fast as plain DDP")
    axes.set_title(f"{TITLE[model]}, batch {size}, medians of {result['rounds']} rounds (lines: min to max)")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_accuracy(axes: Axes, result: dict) -> None:
    learned = result["accuracy"]
    for (name, run), marker in zip(learned["runs"].items(), "osv^D"):
        seconds = np.cumsum(run["seconds"])
        dark = name in (DDP, HIGHLEVEL)
        axes.plot(seconds, run["accuracy"], "-" if dark else "--", marker=marker, color=_color(name), label=name)
    axes.set(xlabel="seconds of training", ylabel="test accuracy", xlim=(0, None))
    axes.set_title(f"LeNet on Fashion-MNIST, after each of {learned['epochs']} epochs")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _color(name: str) -> str:
    if name == NOTEBOOK:
        return "0.6"
    return "tab:blue" if name.startswith(("scratch", "highlevel")) else "tab:orange"


def in_own_processes(subject: Subject, job: dict, compiled: Path) -> dict:
    """What `work` gives, of all the subject's processes together: the longest seconds, the sum of their memory.

    compiled: a folder, kept from run to run, for what torch.compile makes. However this ends, it leaves no process.
    Raises Error, which names the subject, where one fails or is not done in WORKER_SECONDS.
    """
    workers, said, by = [], {}, time.monotonic() + WORKER_SECONDS
    if subject.compiled:
        compiled.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(subject.parts if subject.impl == "pytorch" else 1):
                errors = open(Path(folder) / f"errors-{rank}", "w+b")
                # In a session of its own, Ctrl-C does not reach it, and what it starts itself can be ended with it.
                worker = subprocess.Popen(
                    _command(subject, job, folder, rank),
                    env=_environment(subject, compiled),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
                assert worker.stdout
                workers.append((worker, errors))
                said[worker.stdout] = b""
            open_pipes = set(said)
            while open_pipes:
                ready = select.select(open_pipes, [], [], max(0, by - time.monotonic()))[0]
                if not ready:
                    hang = ": stock MXNet can hang on several contexts" * (subject.impl == "notebook")
                    raise Error(f"{subject.name} was not done after {WORKER_SECONDS} s{hang or ': give fewer steps'}")
                for pipe in ready:
                    part = os.read(pipe.fileno(), 1 << 16)
                    said[pipe] += part
                    if not part:
                        open_pipes.remove(pipe)
                        _check_ended(subject, *next(pair for pair in workers if pair[0].stdout is pipe))
        finally:
            for worker, errors in workers:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
                errors.close()
            for pipe in said:
                pipe.close()
    if subject.compiled and not any(compiled.rglob("*.so")):
        raise Error(f"{subject.name}: torch.compile left the network as it is; another version of PyTorch may do it")
    found = [json.loads(output.splitlines()[-1]) for output in said.values()]
    return {
        **found[0],
        "seconds": [max(of_each) for of_each in zip(*(part["seconds"] for part in found))],
        "losses": [
            None if None in of_each else float(np.mean(of_each)) for of_each in zip(*(p["losses"] for p in found))
        ],
        "peak_mb": sum(part["peak_mb"] for part in found),
    }


def _command(subject: Subject, job: dict, folder: str, rank: int) -> list[str]:
    given = [json.dumps(subject._asdict()), json.dumps(job)]
    if subject.impl == "pytorch":
        return [sys.executable, "-m", "bench.torch_peers", *given, folder, str(rank)]
    return [sys.executable, "-m", "bench.peers", *given]


def _environment(subject: Subject, compiled: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith((*machine.SETTINGS, *TORCH_SETTINGS))}
    if subject.impl == "pytorch":
        kept["GLOO_SOCKET_IFNAME"] = "lo"
        if subject.compiled:  # where torch.compile keeps what it makes, and a compiler that is ended leaves files
            kept["TMPDIR"] = str(compiled)
        if subject.threads > 1:  # as ours on one context: else a little other work on the cores slows it several times
            kept["GOMP_SPINCOUNT"] = engine.SPINS
    elif subject.parts == 1:
        kept["OMP_NUM_THREADS"] = str(subject.threads)
    return kept


def _check_ended(subject: Subject, worker: subprocess.Popen, errors: BinaryIO) -> None:
    """Raise Error where a worker that closed its output did not end well."""
    status = worker.wait()
    if status:
        errors.seek(0)
        silent = f"ended by signal {-status}" if status < 0 else f"ended with {status}"
        last = (errors.read().decode(errors="replace").strip().splitlines() or [silent])[-1]
        raise Error(f"{subject.name} failed: {last}")


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Error("PyTorch is not installed: run `make bench-peers`, or `pip install torch`")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Error(f"torch.compile needs a C++ compiler, and there is no {compiler}: install g++, or set CXX")


def dataset(job: dict) -> datasets.Dataset:
    """The job's Dataset."""
    return datasets.load(job["dataset"], limit=job["limit"], seed=job["seed"])


def initial(parameters: dict[Any, np.ndarray], seed: int) -> dict[Any, np.ndarray]:
    """The parameters with every weight drawn normal(0, 0.01), the same for every subject; biases and what belongs to
    batch normalization stay as given. parameters: {name: NumPy array}, in the order of the layers."""
    rng = np.random.default_rng(seed)
    return {
        name: 0.01 * rng.standard_normal(p.shape, np.float32) if p.ndim > 1 else p for name, p in parameters.items()
    }


def work(job: dict, data: datasets.Dataset, train: Train, accuracy: Callable[[], float]) -> dict:
    """Train as the job says; returns what a worker prints.

    train(order): one pass over these examples; returns their mean loss, or None, and the seconds that are not to count.
    accuracy(): of the test set. "seconds" are of the timed steps, or of each epoch; "peak_mb" of this process.
    """
    examples, size = len(data.train_labels), job["batch_size"]
    found: dict = {"warm_up_seconds": 0, "seconds": [], "losses": [], "accuracy": []}
    if job["warm_up"]:
        start = time.perf_counter()
        train(np.arange(job["warm_up"] * size))
        found["warm_up_seconds"] = time.perf_counter() - start
    for epoch in range(1, max(1, job["epochs"]) + 1):
        start = time.perf_counter()
        order = np.random.default_rng([job["seed"], epoch]).permutation(examples)  # `loop.shuffled`, without mxnet
        loss, outside = train(order[: job["steps"] * size or None])
        found["seconds"].append(time.perf_counter() - start - outside)
        if loss is not None and not math.isfinite(loss):
            raise Error(f"the loss is not a number: {loss}")
        found["losses"].append(None if loss is None else float(loss))
        if job["epochs"]:
            found["accuracy"].append(accuracy())
    return {**found, "peak_mb": machine.peak_mb()}


def _notebook(subject: Subject, job: dict) -> tuple[datasets.Dataset, Train, Callable[[], float]]:
    """The notebook's code: the data, and the functions that `work` needs."""
    notebook = importlib.import_module("gluon_mgpu.parity.notebook")  # before mxnet, which needs what it does
    import mxnet as mx

    data, size = dataset(job), job["batch_size"]
    ctx = [mx.cpu(i) for i in range(subject.parts)]

    def other_way(p: np.ndarray) -> np.ndarray:  # dense weights are (inputs, outputs) there
        return p.T if p.ndim == 2 else p

    arrays = {i: other_way(p.asnumpy()) for i, p in enumerate(notebook.init_params())}
    params = [mx.nd.array(other_way(p)) for p in initial(arrays, job["seed"]).values()]
    device_params = [notebook.get_params(params, c) for c in ctx]

    def batch(images: np.ndarray, labels: np.ndarray, chosen: np.ndarray | slice) -> tuple[NDArray, NDArray]:
        return mx.nd.array(images[chosen]) / 255, mx.nd.array(labels[chosen])

    def train(order: np.ndarray) -> tuple[None, float]:
        making = 0.0

        def train_iter() -> Iterator[tuple[NDArray, NDArray]]:
            nonlocal making
            for i in range(0, len(order), size):
                start = time.perf_counter()
                X, y = batch(data.train_images, data.train_labels, order[i : i + size])
                mx.nd.waitall()
                making += time.perf_counter() - start
                yield X, y

        notebook.train_epoch(train_iter(), device_params, ctx, job["lr"])
        return None, making

    def accuracy() -> float:
        right = 0
        for i in range(0, len(data.test_labels), size):
            X, y = batch(data.test_images, data.test_labels, slice(i, i + size))
            right += (notebook.lenet(X, device_params[0]).argmax(axis=1) == y).sum().asscalar()
        return float(right) / len(data.test_labels)

    return data, train, accuracy


def _ours(subject: Subject, job: dict) -> tuple[datasets.Dataset, Train, Callable[[], float]]:
    """Ours: the data, and the functions that `work` needs."""
    engine.configure(subject.parts)
    module = importlib.import_module(f"gluon_mgpu.{subject.impl}")
    import mxnet as mx

    from gluon_mgpu.training import loop
    from gluon_mgpu.training.settings import Settings

    data, size = dataset(job), job["batch_size"]
    settings = Settings(size, job["lr"], model=job["model"])
    replicas = module.Replicas([mx.cpu(i) for i in range(subject.parts)], settings)
    replicas.load(initial(replicas.parameters(), job["seed"]), {})

    def train(order: np.ndarray) -> tuple[float, float]:
        train_iter = loop.batches(data.train_images, data.train_labels, size, order)
        train_batch = partial(replicas.train_batch, lr=job["lr"])
        return loop.train_epoch(train_batch, train_iter, len(order), subject.name) / len(order), 0

    def accuracy() -> float:
        return replicas.evaluate_accuracy(loop.batches(data.test_images, data.test_labels, size))

    return data, train, accuracy


if __name__ == "__main__":
    subject, job = Subject(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
    prepare = _notebook if subject.impl == "notebook" else _ours
    print(json.dumps(work(job, *prepare(subject, job))))
