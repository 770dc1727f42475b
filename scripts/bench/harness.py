"""Code that measurements share: worker processes, rounds, training, statistics, tables, and --out.

A measurement runs in a worker, a separate process, because the engine reads its settings only once: see __main__.py.
Nothing here imports mxnet into the calling process.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from gluon_mgpu import __version__
from gluon_mgpu.compat import startup
from gluon_mgpu.data import datasets
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.support import files, log, subprocesses
from gluon_mgpu.support.errors import Error

TITLE = {"lenet": "LeNet", "resnet18": "ResNet-18"}
TUNED = "highlevel --tune"
IMPLS = {"lenet": ("scratch", "highlevel", TUNED), "resnet18": ("highlevel", TUNED)}  # scratch has no ResNet-18
BATCH_SIZE = {"lenet": 256, "resnet18": 64}
WARM_UP_STEPS = {"lenet": 10, "resnet18": 2}
STEP_SHARE = {"lenet": 1.0, "resnet18": 0.1}  # multiplies --steps; ResNet-18 computes about 80 times as much per step
LR = {"lenet": 0.2, "resnet18": 0.025}  # as in the recipes, which use 0.1 for ResNet-18 with a batch of 256

SCRIPTS = Path(__file__).resolve().parents[1]
# Environment variables that begin with these names change how MXNet or PyTorch computes.
SETTINGS = ("OMP_", "GOMP_", "MXNET_", "MALLOC_", "GLIBC_TUNABLES", "TORCH", "PYTORCH_", "MKL_", "KMP_", "GLOO_")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
INSTRUCTION_SETS = {"avx2": "avx2", "avx512f": "avx512", "amx_tile": "amx"}  # {flag in /proc/cpuinfo: name}
PACKAGES = {"mxnet": "MXNet", "mxnet-cu112": "MXNet", "numpy": "NumPy", "torch": "PyTorch"}

Rounds = dict[str, list]  # {what was measured: one value per round}
Step = Callable[[Any, Any, float], list]  # a training step: takes X, y and lr, returns the losses of each shard
# Trains on the examples with these indices, in this order; returns the mean loss (None if unknown) and the seconds.
Train = Callable[[Dataset, np.ndarray], tuple[Any, float]]


# Workers and rounds


def environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """A worker's environment: the user's environment, except SETTINGS, plus `settings`."""
    users = subprocesses.users_environment()
    kept = {name: value for name, value in users.items() if not name.startswith(SETTINGS)}
    path = os.pathsep.join(filter(None, [str(SCRIPTS), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, **(settings or {})}


class Job(NamedTuple):
    """One measurement, which a worker runs: bench.MODULE.work(**ARGUMENTS)."""

    module: str
    arguments: Mapping[str, Any]
    env: Mapping[str, str] | None = None  # None: `environment()`
    launcher: tuple[str, ...] = ()  # a command that starts the worker
    seconds: float = 900  # time limit
    advice: str = "use fewer steps"  # tells the user what to do if the job takes longer


def start(name: str, job: Job) -> dict[str, Any]:
    """Run a job in a separate process and return its result, the last line that it prints.

    name: what is measured, for messages. Raises the Error or UsageError that the worker raised, or Error if the
    worker fails in another way or prints no result.
    """
    command = [*job.launcher, sys.executable, "-m", "bench", job.module, json.dumps(job.arguments)]
    finished = subprocesses.run(command, env=job.env or environment(), seconds=job.seconds)
    subprocesses.raise_for_status(name, finished, job.advice)
    last = finished.out.strip().rpartition("\n")[2]
    try:
        return json.loads(last)
    except ValueError:
        raise Error(f"{name} failed: its last line of output is not a result: {last!r}") from None


def measure(jobs: Mapping[Any, Job], rounds: int) -> dict[Any, Rounds]:
    """Run jobs that return {what: value}. Returns {subject: {what: [value per round]}}.

    Each round runs every job once, so results from the same round can be compared even if the machine's speed changes.
    """
    results: dict[Any, Rounds] = {subject: {} for subject in jobs}
    with tqdm(total=rounds * len(jobs), unit=" run", leave=False, disable=None) as bar:
        for _ in range(rounds):
            for subject, job in jobs.items():
                bar.set_description(str(subject))
                for what, value in start(str(subject), job).items():
                    results[subject].setdefault(what, []).append(value)
                bar.update()
    return results


# Training, in a worker


def build(impl: str, model: str, contexts: int, *, size: int | None = None, **options: Any) -> Any:
    """Create a model on CPU contexts of this process, with the parameters of `initial`.

    impl: "scratch", "highlevel" or TUNED. size: examples per step. options: other fields of the configuration.
    """
    startup.configure(contexts)
    import mxnet as mx

    from gluon_mgpu.training.config import Config
    from gluon_mgpu.training.model import read_arrays
    from gluon_mgpu.training.models import create_model

    config = Config(batch_size=size or BATCH_SIZE[model], model=model, tune=impl == TUNED, **options)
    built = create_model(impl.split()[0], [mx.cpu(i) for i in range(contexts)], config)
    built.load(initial(read_arrays(built)))
    return built


def initial(parameters: dict[Any, np.ndarray]) -> dict[Any, np.ndarray]:
    """Draw all weights from normal(0, 0.01), the same for every trainer; keep biases and the arrays of batch
    normalization unchanged. parameters: {name: NumPy array}, in the order of the layers."""
    rng = np.random.default_rng(0)
    return {
        name: 0.01 * rng.standard_normal(p.shape, np.float32) if p.ndim > 1 else p for name, p in parameters.items()
    }


def train(
    step: Step, lr: float, data: Dataset, size: int, order: Sequence[int] | np.ndarray, part: Any = None
) -> float:
    """Train with MXNet in the same way as the training loop. Returns the mean of the losses that this process computed.

    size: examples per step. order: indices of the examples. part: see `batches.batches`.
    """
    from mxnet import nd

    from gluon_mgpu.data import batches

    pending = batches.Pending()
    losses: list[np.ndarray] = []
    for X, y in batches.batches(data.train_images, data.train_labels, size, np.asarray(order), part):
        pending.add(step(X, y, lr))
        losses += pending.ready()
    losses += pending.rest()
    nd.waitall()  # waits for the last update
    return float(np.concatenate(losses).mean(dtype=np.float64))


def timed(step: Step, lr: float, size: int) -> Train:
    """Create a function that trains by calling `step` and measures the time. size: examples per step."""

    def timed_train(data: Dataset, order: np.ndarray) -> tuple[float, float]:
        start = time.perf_counter()
        return train(step, lr, data, size, order), time.perf_counter() - start

    return timed_train


def time_steps(train: Train, model: str, size: int, steps: int) -> dict[str, Any]:
    """Time training on synthetic data, after a warm-up. Returns ms per step, the mean loss and the peak memory.

    size: examples per step. steps: number of steps of LeNet with batch size 256; adjusted for other models and sizes.
    """
    steps = max(5, round(steps * STEP_SHARE[model] * BATCH_SIZE[model] / size))
    warm_up = WARM_UP_STEPS[model]
    data = datasets.synthetic(max(steps, warm_up) * size, 100, seed=0)
    train(data, np.arange(warm_up * size))
    loss, seconds = train(data, np.random.default_rng(0).permutation(steps * size))
    return {"step_ms": 1000 * seconds / steps, "loss": loss, "peak_mb": peak_mb()}


def peak_mb() -> float:
    """This process's peak memory in MB. getrusage would include the peak of the process that started it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


# Results


def spread(values: Sequence[float], digits: int) -> str:
    """Format values as "median (min-max)". digits: number of decimals."""
    middle, low, high = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def ratios(slow: Rounds, fast: Rounds) -> list[float]:
    """For each round, the step time of `slow` divided by the step time of `fast`."""
    return [a / b for a, b in zip(slow["step_ms"], fast["step_ms"])]


def speed_table(title: str, rows: Iterable[tuple[str, int, Rounds, Mapping[str, Any]]]) -> list[str]:
    """Format a table of steps. rows: name, batch size, run, and more columns, of text or of one ratio per round."""
    cells = []
    for name, size, run, columns in rows:
        others = [value if isinstance(value, str) else spread(value, 2) for value in columns.values()]
        rate, peak = 1000 * size / median(run["step_ms"]), median(run["peak_mb"])
        cells.append([name, spread(run["step_ms"], 1), f"{rate:.0f}", *others, f"{peak:.0f}"])
    return log.table([[title, "ms/step", "examples/s", *columns, "peak MB"], *cells])


def facts() -> dict[str, Any]:
    """Describe the machine and the versions of this project and its packages, as {name: value}."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict(line.replace("\t", "").split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    flags = fields.get("flags", "").split()
    versions = {"gluon_mgpu": __version__, "Python": platform.python_version()}
    for package, name in PACKAGES.items():
        with suppress(PackageNotFoundError):
            versions[name] = version(package)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": fields.get("model name", platform.machine()).strip(),
        "instruction_sets": [name for flag, name in INSTRUCTION_SETS.items() if flag in flags],
        "DNNL_MAX_CPU_ISA": os.environ.get("DNNL_MAX_CPU_ISA"),
        "versions": versions,
    }


def machine_line() -> str:
    """Format the machine and the package versions as one line."""
    machine = facts()
    limit = f", DNNL_MAX_CPU_ISA={machine['DNNL_MAX_CPU_ISA']}" if machine["DNNL_MAX_CPU_ISA"] else ""
    sets = ", ".join(machine["instruction_sets"]) or "no AVX2"
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"{machine['cores']} {log.plural(machine['cores'], 'core')} of {machine['cpu']} ({sets}{limit}); {versions}"


def write(out: str | Path, name: str, result: dict[str, Any], draw: Callable[..., object] | None = None) -> None:
    """Write the result and a description of the machine to NAME.json in the folder `out`. draw(result, file), if given,
    draws NAME.png."""
    text = json.dumps({"machine": facts(), **result}, indent=1)
    files.write_whole(Path(out, f"{name}.json"), lambda file: file.write(text.encode()))
    if draw:
        files.write_whole(Path(out, f"{name}.png"), lambda file: draw(result, file))
