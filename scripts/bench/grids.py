"""The grids: lists of points, how each point is measured, and the table and the picture of the results.

Nothing here imports mxnet or torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import queue
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

from gluon_mgpu import __version__
from gluon_mgpu.compat import startup
from gluon_mgpu.support import files, log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError

TITLE = {"lenet": "LeNet", "resnet18": "ResNet-18"}
BATCH_SIZE = {"lenet": 256, "resnet18": 64}
TUNED = "highlevel --tune"
IMPLS = {"lenet": ("scratch", "highlevel", TUNED), "resnet18": ("highlevel",)}  # tuning does not change ResNet-18

SCRIPTS = Path(__file__).resolve().parents[1]
# Environment variables that begin with these names change how MXNet or PyTorch computes.
SETTINGS = ("OMP_", "GOMP_", "MXNET_", "MALLOC_", "GLIBC_TUNABLES", "TORCH", "PYTORCH_", "MKL_", "KMP_", "GLOO_")
INSTRUCTION_SETS = {"avx2": "avx2", "avx512f": "avx512", "amx_tile": "amx"}  # {flag in /proc/cpuinfo: name}
PACKAGES = ("mxnet", "mxnet-cu112", "numpy", "torch")
COLORS = {"notebook": "0.6", "PyTorch": "tab:orange"}  # the other implementations are blue
SECONDS = 900  # time limit of a turn; the first one includes imports and torch.compile


class Point(NamedTuple):
    """What is measured."""

    impl: str  # one of IMPLS, "notebook", a way of `partition`, or "PyTorch", with "channels_last" or "torch.compile"
    model: str = "lenet"
    batch_size: int = BATCH_SIZE["lenet"]  # examples per step, on all devices together
    contexts: int = 2  # per worker
    workers: int = 1  # processes that train together
    threads: int = 1  # per context
    device: str = ""  # "gpu": when the call of a step returns, and when it is done; "cpu": the same without a GPU

    @property
    def is_torch(self) -> bool:
        return self.impl.startswith("PyTorch")

    def __str__(self) -> str:
        parts = [("workers", self.workers), ("contexts", 1 if self.is_torch else self.contexts)]
        counts = [f"{n} {log.plural(n, name[:-1])}" for name, n in [*parts, ("threads", self.threads)] if n > 1]
        return ", ".join([self.impl, *(counts or ["1 thread"])]) if not self.device else self.impl


class Grid(NamedTuple):
    about: str
    points: list[Point]
    by: tuple[str, ...] = ("model", "batch_size")  # points with the same values of these fields share a table
    baselines: tuple[str, ...] = ()  # points, as text, with whose speed others are compared; default: the first


Rounds = dict[str, list]  # {what was measured: one value per round}
Turn = Callable[[], dict[str, Any]]  # lets a point's processes measure once; returns {what: value}


def _peers() -> Iterator[Point]:
    yield Point("notebook")
    for model, size in BATCH_SIZE.items():
        for workers, threads in ((1, 2), (2, 1)):
            for variant in ("", ", channels_last", ", torch.compile"):
                yield Point(f"PyTorch{variant}", model, size, 1, workers, threads)
        for contexts in (2, 1):
            yield from (Point(impl, model, size, contexts) for impl in IMPLS[model])


def _scaling() -> Iterator[Point]:
    for model, sizes in (("lenet", (64, 256)), ("resnet18", (16, 64))):
        for impl in IMPLS[model]:
            shapes = [(k, size * factor) for k in (1, 2, 4, 8) for size in sizes for factor in (1, k)]
            yield from (Point(impl, model, size, k) for k, size in dict.fromkeys(shapes))  # strong and weak scaling


WAYS = ("network partitioning", "network partitioning, 4 micro-batches", "layer-wise partitioning", "data parallelism")
GRIDS = {
    "peers": Grid(
        "this project, the notebook's code and PyTorch",
        [*_peers()],
        baselines=("PyTorch, 2 workers", "fastest PyTorch", "notebook, 2 contexts"),
    ),
    "scaling": Grid(
        "1 to 8 contexts, with the same batch and with the same shards",
        [*_scaling()],
        ("model", "impl"),
    ),
    "distributed": Grid(
        "2 MPI workers with 1 context each, and 1 process with 2 contexts",
        [
            Point(impl, model, BATCH_SIZE[model], 2 // workers, workers)
            for model in TITLE
            for impl in IMPLS[model]
            if impl != TUNED
            for workers in (1, 2)
        ],
        ("model", "impl", "batch_size"),
    ),
    "partition": Grid(
        "three ways to split LeNet: time, and idle time of each device",
        [Point("data parallelism", contexts=1), *map(Point, WAYS)],
    ),
    "gpu": Grid(
        "one GPU, here and in PyTorch: when calls return, and when the work is done",
        [
            Point(impl, model, size, 1, device="gpu")
            for model in TITLE
            for size in (16, 64, 256, 512, 1024, 4096)
            for impl in ("highlevel", "PyTorch")
        ],
        baselines=("PyTorch",),
    ),
}


# Measuring


def measure_grid(grid: str, rounds: int, steps: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure a grid's points. Returns the input of `table`, `draw` and `write`.

    Each point has its own processes. Those of a table take turns, so that results of the same round can be compared
    even if the machine's speed changes. steps: per turn, of LeNet with 256 examples. only: measure points whose names
    contain one of these texts, such as "LeNet: scratch". Prints a line for each turn on standard error.
    Raises UsageError if there is no such point, Error if something is missing or fails.
    """
    points = [point for point in GRIDS[grid].points if not only or any(text in title(point) for text in only)]
    if not points:
        names = "; ".join(map(title, GRIDS[grid].points))
        raise UsageError("only", only[0], f"must be part of the name of a point: {names}")
    if any(point.is_torch for point in points) and importlib.util.find_spec("torch") is None:
        raise Error("PyTorch is not installed: run `make torch`")
    results: dict[Point, Rounds] = {point: {} for point in points}
    for _, of_table in groupby(points, key=attrgetter(*GRIDS[grid].by)):
        with ExitStack() as stack:
            turns = {point: stack.enter_context(taking_turns(point, steps)) for point in of_table}
            for number in range(rounds):
                for point, turn in turns.items():
                    measured = turn()
                    for what, value in measured.items():
                        results[point].setdefault(what, []).append(value)
                    about = f"{measured['step_ms']:.1f} ms per step (round {number + 1} of {rounds})"
                    log.say(f"{title(point)}: {about}", "")
    of_points = [{**point._asdict(), **result} for point, result in results.items()]
    return {"grid": grid, "rounds": rounds, "machine": machine(), "points": of_points}


def title(point: Point) -> str:
    return f"{TITLE[point.model]}: {point}, batch {point.batch_size}"


@contextmanager
def taking_turns(point: Point, steps: int) -> Iterator[Turn]:
    """A point's processes, which start with the first turn, and end with the `with` block. Between turns, they wait for
    a byte in a named pipe.

    A turn raises the Error or UsageError that the processes raised, or Error if they fail in another way.
    """
    results: queue.Queue[dict[str, Any] | None] = queue.Queue()  # None: the processes have ended
    ended: Future[subprocesses.Finished] | None = None

    def read(line: str) -> None:
        with suppress(ValueError):  # something else that a library prints
            results.put(dict(json.loads(line)))

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        os.mkfifo(pipe := os.path.join(folder, "turns"))
        writer = os.open(pipe, os.O_RDWR)  # the processes end if it is closed, also by the end of this process
        launcher = [_mpiexec(), "-n", str(point.workers)] if point.workers > 1 and not point.is_torch else []
        command = [*launcher, sys.executable, "-m", "bench", json.dumps(point), str(steps), pipe]

        def turn() -> dict[str, Any]:
            nonlocal ended
            os.write(writer, bytes(point.workers))
            if ended is None:
                ended = pool.submit(subprocesses.run, command, env=environment(point, folder), on_line=read)
                ended.add_done_callback(lambda _: results.put(None))
            try:
                result = results.get(timeout=SECONDS)
            except queue.Empty:
                advice = "stock MXNet can hang on several contexts" if point.impl == "notebook" else "use fewer steps"
                raise Error(f"{point} did not finish in time: {advice}") from None
            if result is None:
                subprocesses.raise_for_status(str(point), ended.result())
                raise Error(f"{point} failed: it ended without a result")
            return result

        try:
            yield turn
        finally:
            os.close(writer)
            os.unlink(pipe)  # a process that opens it only now fails, instead of waiting for a writer
            subprocesses.kill_running()


def environment(point: Point, folder: str) -> dict[str, str]:
    """The environment of a point's process: the user's without SETTINGS, and what the point needs."""
    users = subprocesses.users_environment()
    kept = {name: value for name, value in users.items() if not name.startswith(SETTINGS)}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPTS), kept.get("PYTHONPATH")]))
    if point.device:
        of_mxnet = {name: value for name, value in users.items() if name.startswith("MXNET_")}
        # As with cudnn.benchmark in PyTorch, cuDNN's algorithms are timed.
        return {**kept, "MXNET_CUDNN_AUTOTUNE_DEFAULT": "1", **of_mxnet, "NVIDIA_TF32_OVERRIDE": "0"}
    if point.is_torch:
        kept |= {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": folder}  # a killed compiler leaves files in TMPDIR
        if point.threads > 1:  # as startup.configure does for one context
            kept["GOMP_SPINCOUNT"] = startup.SPINS
    elif point.impl != "notebook":
        kept["OMP_NUM_THREADS"] = str(point.threads)
    return kept


def _mpiexec() -> str:
    folders = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    found = shutil.which("mpiexec", path=folders)
    if found is None:
        raise Error("mpiexec was not found: run `pip install '.[mpi]'`")
    return found


# Results


def ratios(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> list[float]:
    """For each round, the examples per second of `fast`, divided by those of `slow`. Both: entries of "points"."""
    grown = fast["batch_size"] / slow["batch_size"]
    return [grown * a / b for a, b in zip(slow["step_ms"], fast["step_ms"])]


def panels(result: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """The points of each table of a grid, {title: {name: point}}."""
    by, found = GRIDS[result["grid"]].by, dict[str, dict[str, dict[str, Any]]]()
    for point in result["points"]:
        parts = {"model": TITLE[point["model"]], "impl": point["impl"], "batch_size": f"batch {point['batch_size']}"}
        name = str(Point(*(point[field] for field in Point._fields)))
        name += "" if "batch_size" in by else f", {parts['batch_size']}"
        found.setdefault(", ".join(parts[field] for field in by), {})[name] = point
    return found


def spread(values: Sequence[float], digits: int) -> str:
    """Format values as "median (min-max)". digits: number of decimals."""
    middle, low, high = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return f"{middle} ({low}-{high})"


def table(result: Mapping[str, Any]) -> str:
    """Format the results. Speeds are compared in each round; the columns without a range are medians."""
    lines = [f"{GRIDS[result['grid']].about}; medians of {result['rounds']} rounds (min-max)", result["machine"]]
    for title, points in panels(result).items():
        torch = {name: point for name, point in points.items() if point["impl"].startswith("PyTorch")}
        fastest = min(torch.values(), key=lambda point: median(point["step_ms"]), default=None)
        baselines = GRIDS[result["grid"]].baselines or (next(iter(points)),)
        bases = {name: fastest if name == "fastest PyTorch" else points.get(name) for name in baselines}
        found = {f"x {name}": base for name, base in bases.items() if base}
        measured = dict.fromkeys(what for point in points.values() for what in point)
        others = [what for what in measured if what not in (*Point._fields, "step_ms")]
        rows = [[title, "ms/step", "examples/s", *found, *others]]
        for name, point in points.items():
            rate = f"{1000 * point['batch_size'] / median(point['step_ms']):.0f}"
            compared = [spread(ratios(base, point), 2) for base in found.values()]
            rounds = [point.get(what, [None]) for what in others]
            medians = ["" if None in values else f"{median(values):.5g}" for values in rounds]
            rows.append([name, spread(point["step_ms"], 2), rate, *compared, *medians])
        lines += ["", *log.table(rows)]
    return "\n".join(lines)


def draw(result: Mapping[str, Any], file: BinaryIO) -> None:
    """Draw the examples per second of each point as PNG, with one panel per table. Lines: from minimum to maximum."""
    from matplotlib.figure import Figure

    heights = [len(points) for points in panels(result).values()]
    figure = Figure(figsize=(8, 0.9 * len(heights) + 0.42 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (title, points) in zip(grid, panels(result).items()):
        rates = [[1000 * point["batch_size"] / ms for ms in point["step_ms"]] for point in points.values()]
        middle = [median(rate) for rate in rates]
        ranges = [[m - min(rate) for m, rate in zip(middle, rates)], [max(rate) - m for m, rate in zip(middle, rates)]]
        colors = [COLORS.get(point["impl"].split(",")[0], "tab:blue") for point in points.values()]
        bars = axes.barh([*points], middle, xerr=ranges, color=colors)
        axes.bar_label(bars, [f"{rate:.0f}" for rate in middle], padding=5)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.set_title(f"{title}: examples/s, median of {result['rounds']} rounds")
    figure.savefig(file, format="png", dpi=120)


def write(out: str | Path, result: Mapping[str, Any]) -> None:
    """Write GRID.json and GRID.png to the folder `out`."""
    os.makedirs(out, exist_ok=True)
    text = json.dumps(result, indent=1)
    files.write_whole(Path(out, f"{result['grid']}.json"), lambda file: file.write(text.encode()))
    files.write_whole(Path(out, f"{result['grid']}.png"), lambda file: draw(result, file))


def machine() -> str:
    """Describe the processor, and the versions of this project and its packages."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    fields = dict(line.replace("\t", "").split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    flags = fields.get("flags", "").split()
    sets = [name for flag, name in INSTRUCTION_SETS.items() if flag in flags] or ["no AVX2"]
    if "DNNL_MAX_CPU_ISA" in os.environ:
        sets.append(f"DNNL_MAX_CPU_ISA={os.environ['DNNL_MAX_CPU_ISA']}")
    versions = [f"gluon_mgpu {__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    cores, cpu = len(os.sched_getaffinity(0)), fields.get("model name", platform.machine()).strip()
    return f"{cores} {log.plural(cores, 'core')} of {cpu} ({', '.join(sets)}); {', '.join(versions)}"
