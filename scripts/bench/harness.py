"""What all measurements share: worker processes, rounds, statistics, tables, and the files that --out leaves.

A measurement runs in a process of its own, `python -m bench.MODULE JOB`, because the engine reads its settings once.
JOB and the last line that the process prints are JSON. Nothing here imports mxnet into the calling process.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from tqdm import tqdm

from gluon_mgpu import __version__
from gluon_mgpu.runtime import engine, subprocesses
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import checkpoint

if TYPE_CHECKING:
    import numpy as np

TITLE = {"lenet": "LeNet", "resnet18": "ResNet-18"}
IMPLS = {"lenet": ("scratch", "highlevel"), "resnet18": ("highlevel",)}  # scratch has no ResNet-18
BATCH_SIZE = {"lenet": 256, "resnet18": 64}
WARM_UP_STEPS = {"lenet": 10, "resnet18": 2}
STEP_SHARE = {"lenet": 1.0, "resnet18": 0.1}  # of --steps: a step of ResNet-18 computes about 80 times as much
LR = {"lenet": 0.2, "resnet18": 0.025}  # as in the recipes; ResNet-18's is 0.1 for a batch of 256

SCRIPTS = Path(__file__).resolve().parents[1]
SETTINGS = ("OMP_", "GOMP_", "MXNET_", "MALLOC_", "GLIBC_TUNABLES")  # environment variables that change the engine
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SECONDS = 300  # for one worker
INSTRUCTION_SETS = {"avx2": "avx2", "avx512f": "avx512", "amx_tile": "amx"}  # {flag in /proc/cpuinfo: name}

Subject = TypeVar("Subject", bound=Hashable)
Draw = Callable[[dict, BinaryIO], None]


def environment(
    settings: Mapping[str, str] | Iterable[tuple[str, str]] = (), without: tuple[str, ...] = SETTINGS
) -> dict[str, str]:
    """The environment of a worker: the user's, without variables that begin with `without`, and with these settings."""
    kept = {name: value for name, value in engine.users_environment().items() if not name.startswith(without or "\0")}
    path = [str(SCRIPTS), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(path), **dict(settings)}


def worker(
    name: str,
    module: str,
    job: object,
    *,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
    seconds: float = SECONDS,
    advice: str = "use fewer steps",
    on_line: Callable[[str], object] | None = None,
) -> Any:
    """Run `python -m bench.MODULE JOB` in a process of its own and return the JSON in the last line that it prints.

    name: what is measured, for messages. env: default `environment()`. launcher: a command that starts the program.
    advice: what to do if it takes longer than `seconds`. on_line: called with each line that it prints.
    Raises the worker's own Error or UsageError; Error if it fails in another way or prints no result.
    """
    command = [*launcher, sys.executable, "-m", f"bench.{module}", json.dumps(job)]
    finished = subprocesses.run(command, env=env or environment(), seconds=seconds, on_line=on_line)
    subprocesses.check(name, finished, advice)
    last = (finished.out.strip().splitlines() or [""])[-1]
    try:
        return json.loads(last)
    except ValueError:
        raise Error(f"{name} failed: its last line is not a result: {last!r}") from None


def in_turn(
    subjects: Iterable[Subject], rounds: int, measure: Callable[[Subject], Any], name: Callable[[Subject], str] = str
) -> dict[Subject, list[Any]]:
    """{subject: [measure(subject) of each round]}. Each round measures every subject once, so results of one round can
    be compared even if the machine's speed changes. name: of a subject, for the progress bar."""
    results: dict[Subject, list[Any]] = {subject: [] for subject in subjects}
    with progress(rounds * len(results)) as bar:
        for _ in range(rounds):
            for subject, found in results.items():
                bar.set_description(name(subject))
                found.append(measure(subject))
                bar.update()
    return results


def progress(total: int, unit: str = "run") -> tqdm:
    """A progress bar, on terminals only."""
    return tqdm(total=total, unit=f" {unit}", leave=False, disable=not sys.stderr.isatty())


def train(
    replicas: Any,
    images: np.ndarray,
    labels: np.ndarray,
    size: int,
    lr: float = 0.01,
    order: np.ndarray | None = None,
    part: Callable[[int], slice] | None = None,
) -> float:
    """Train on each example once, as the training loop does; returns the mean of the losses that this process computed.

    size: examples per step. order: their indices. part: this worker's slice of a batch.
    """
    from gluon_mgpu.training import batches

    data_iter = batches.batches(images, labels, size, order, part)
    return batches.mean(replicas.train_batch(X, y, lr, size if part else 0) for X, y in data_iter)


def spread(values: Sequence[float], digits: int | None = None) -> str:
    """Median (min-max). digits: after the point; None: three significant digits."""
    show = three_digits if digits is None else (lambda value: f"{value:.{digits}f}")
    return f"{show(median(values))} ({show(min(values))}-{show(max(values))})"


def three_digits(value: float) -> str:
    """1234, 123, 12.3, 1.23, 0.123, 0.012."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def ratios(slow: Sequence[dict], fast: Sequence[dict], key: str = "step_ms") -> list[float]:
    """How many times as long one subject took as the other, in each round."""
    return [a[key] / b[key] for a, b in zip(slow, fast)]


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Rows of cells as lines: the first column aligned left, the others right. The first row holds the headings."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells)))]
    lines = []
    for first, *others in cells:
        right = "".join(f"  {cell:>{width}}" for cell, width in zip(others, widths[1:]))
        lines.append(f"{first:{widths[0]}}{right}".rstrip())
    return lines


def plural(count: int, noun: str) -> str:
    """The count and its noun: 1 context, 2 contexts."""
    return f"{count} {noun}{'s' * (count != 1)}"


def facts() -> dict[str, Any]:
    """{name: value} of the machine, the versions, and the engine's settings in this process's environment."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict(line.replace("\t", "").split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    flags = fields.get("flags", "").split()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": fields.get("model name", platform.machine()).strip(),
        "instruction_sets": [name for flag, name in INSTRUCTION_SETS.items() if flag in flags],
        "DNNL_MAX_CPU_ISA": os.environ.get("DNNL_MAX_CPU_ISA"),
        "gluon_mgpu": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mxnet", "numpy", "torch")},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }


def machine_line(found: dict[str, Any] | None = None) -> str:
    """The facts in one line, without the settings."""
    found = found or facts()
    limit = f", DNNL_MAX_CPU_ISA={found['DNNL_MAX_CPU_ISA']}" if found["DNNL_MAX_CPU_ISA"] else ""
    versions = {"Python": "python", "MXNet": "mxnet", "NumPy": "numpy", "PyTorch": "torch"}
    named = ", ".join(f"{name} {found[key]}" for name, key in versions.items() if found[key])
    sets = ", ".join(found["instruction_sets"]) or "no AVX2"
    return f"{plural(found['cores'], 'core')} of {found['cpu']} ({sets}{limit}); {named}"


def peak_mb() -> float:
    """The most memory that this process has used, in MB. getrusage would include the process that started it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def leave(out: str | Path, name: str, result: dict, draw: Draw) -> None:
    """Write the result, with the machine's facts, to NAME.json in the folder out, and its picture to NAME.png."""
    folder = folder_for(out)
    text = json.dumps({"machine": facts(), **result}, indent=1) + "\n"
    checkpoint.write_whole(folder / f"{name}.json", lambda file: file.write(text.encode()))
    checkpoint.write_whole(folder / f"{name}.png", lambda file: draw(result, file))


def folder_for(out: str | Path) -> Path:
    """The folder of --out, created if it does not exist."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from None
    return Path(out)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return version("mxnet-cu112") if package == "mxnet" else None
