"""The lecture's experiment: how much time a second device saves, and how batch size and learning rate affect accuracy.

Each run trains in a new process, because the engine's settings depend on the number of contexts. Source: the lecture
"L14_6 Multi-GPU Training in Python".
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gluon_mgpu.data import datasets
from gluon_mgpu.runtime import devices, engine, files, log, subprocesses
from gluon_mgpu.runtime.errors import UsageError, shown
from gluon_mgpu.training import records
from gluon_mgpu.training.records import Epoch
from gluon_mgpu.training.settings import PLAIN, Settings, flag

NAME, SWEEP = "batch-size", "batch-size-sweep"  # names of the experiments; each writes NAME.png and NAME.csv


class Variant(NamedTuple):
    """The settings of one run that differ between the runs."""

    devices: int
    batch_size: int  # across all devices
    scale_lr: bool = False  # multiply the learning rate by batch_size / 256
    lr: float = 0.0  # 0: use the experiment's learning rate

    def __str__(self) -> str:
        device = "1 device" if self.devices == 1 else f"{self.devices} devices"
        lr = ", lr scaled" if self.scale_lr else f", lr {self.lr:g}" if self.lr else ""
        return f"{device}, batch {self.batch_size}{lr}"

    @property
    def folder(self) -> str:
        return str(self).replace(",", "").replace(" ", "-")


RUNS = (Variant(1, 256), Variant(2, 256), Variant(1, 512), Variant(2, 512), Variant(2, 512, scale_lr=True))
SIZES, FACTORS = (128, 256, 512), (0.5, 1, 2, 3, 4)  # the sweep's batch sizes and learning-rate multipliers


class Result(NamedTuple):
    run: Variant
    config: dict[str, Any]  # content of config.json
    epochs: list[Epoch]

    def step(self, epoch: Epoch) -> int:
        """The number of steps from the start of the run to the end of an epoch."""
        examples = round(epoch.samples_per_second * epoch.train_seconds)
        return epoch.epoch * -(-examples // self.run.batch_size)


def run(out: str | Path, **options: Any) -> list[Result]:
    """Train all runs in RUNS, each in its own folder in `out`, and write a picture and a CSV table to `out`.

    options, exceptions: see `train_all`.
    """
    results = train_all(out, RUNS, **options)
    _write(out, NAME, results, draw)
    return results


def sweep(out: str | Path, *, lr: float = PLAIN.lr, **options: Any) -> list[Result]:
    """Train on 2 devices with each combination of batch size (in SIZES) and learning rate (lr times one of FACTORS).

    Writes a picture and a CSV table to `out`. options, exceptions: see `train_all`.
    """
    runs = [Variant(2, size, lr=float(f"{lr * factor:g}")) for size in SIZES for factor in FACTORS]
    results = train_all(out, runs, lr=lr, **options)
    _write(out, SWEEP, results, draw_sweep)
    return results


def train_all(
    out: str | Path,
    runs: Sequence[Variant],
    *,
    impl: str = "scratch",
    device: str = "auto",
    data_dir: str | Path | None = None,
    seed: int = 1,
    **settings: Any,
) -> list[Result]:
    """Train all runs, each in its own folder in `out`. Finished runs are skipped, and interrupted runs continue.

    impl: "scratch" or "highlevel". device, data_dir: see `loop.train`. seed, settings: fields of `Settings`. All runs
    start from the same parameters. On CPU, each context gets one OpenMP thread, even if it is the only context. Raises
    UsageError if settings or devices are invalid, or if `out` holds runs with different options. Raises Error if the
    data is not available or a run fails.
    """
    varied: dict[Variant, dict[str, Any]] = {
        r: {"batch_size": r.batch_size, "scale_lr": r.scale_lr, **({"lr": r.lr} if r.lr else {})} for r in runs
    }
    checked, *_ = [Settings(**{**settings, **of_it, "seed": seed}) for of_it in varied.values()]
    most = max(r.devices for r in runs)
    try:
        ctx = devices.contexts(most, device)
    except UsageError as error:
        if error.name == "num_gpus":  # this command has no such setting
            raise UsageError("device", device, f"the experiment uses {most} devices, and {error.advice}") from None
        raise
    devices.say_if_no_gpu(ctx, device)
    datasets.load(checked.dataset, data_dir, checked.limit, seed)  # downloads the data set if necessary
    kind = ctx[0].device_type
    env = {"OMP_NUM_THREADS": "1"} if kind == "cpu" else {}
    common = {"impl": impl, "device": kind, "data_dir": data_dir, "seed": seed, "epochs": checked.epochs, **settings}
    results = []
    with log.progress(total=len(runs) * checked.epochs, unit="epoch") as bar:
        for r, of_it in varied.items():
            bar.set_description(str(r))
            folder = Path(out) / r.folder
            epochs = finish(str(r), folder, {**common, **of_it, "num_gpus": r.devices}, bar.update, env)
            results.append(Result(r, records.last(folder)[1], epochs))
    return results


def finish(
    name: str,
    folder: Path,
    options: dict[str, Any],
    on_epochs: Callable[[int], object],
    env: Mapping[str, str] | None = None,
) -> list[Epoch]:
    """Train a run in its own process. Continues an interrupted run, and skips a finished run. Returns the run's epochs.

    name: used in error messages. options: settings, including epochs, num_gpus and device. on_epochs: called with the
    number of newly finished epochs. Raises UsageError if the folder holds a different run, Error if the run fails.
    """
    begun = records.exists(folder)
    if begun:
        _check_same(folder, options)
    finished = records.last(folder)[-1].history if begun else []
    on_epochs(len(finished))
    if len(finished) == options["epochs"]:
        return finished
    command = {**options, "resume" if begun else "out": folder}
    flags = [
        flag(option) if value is True else f"{flag(option)}={shown(value)}"
        for option, value in command.items()
        if value is not None and value is not False
    ]
    environment = {**engine.users_environment(), **(env or {})}
    try:
        done = subprocesses.run(
            [sys.executable, "-m", "gluon_mgpu", "train", *flags],
            env=environment,
            on_line=lambda line: on_epochs(line.startswith("epoch ")),
        )
    except KeyboardInterrupt:
        log.say("run the same command again to continue")
        raise
    subprocesses.check(name, done)
    return records.last(folder)[-1].history


def _check_same(folder: Path, options: dict[str, Any]) -> None:
    """Raise UsageError if the run in `folder` has different options. The run may have fewer epochs."""
    found, wanted = records.recorded_options(folder), {**options, "num_gpus": devices.parse(options["num_gpus"])}
    if found["epochs"] < wanted["epochs"]:
        del wanted["epochs"]
    differ = [f"{o} {found[o]}, not {value}" for o, value in wanted.items() if o in found and found[o] != value]
    if differ:
        raise UsageError(None, folder, f"holds a different run ({'; '.join(differ)}); use another folder")


def table(results: Sequence[Result]) -> str:
    """Format a table of each run's median seconds per epoch, speed-up over the first run, and accuracies."""
    seconds = [median(e.train_seconds for e in result.epochs) for result in results]
    rows: list[list[object]] = [["", "lr", "s/epoch", "speed-up", "test accuracy by epoch"]]
    for result, s in zip(results, seconds):
        accuracies = "  ".join(f"{e.test_accuracy:.2f}" for e in result.epochs)
        lr = result.epochs[-1].learning_rate
        rows.append([result.run, f"{lr:g}", f"{s:.2f}", f"{seconds[0] / s:.2f}", accuracies])
    lines = [_title(results), *log.table(rows)]
    if results[0].config["devices"] == ["cpu(0)"]:
        lines.append("On CPU, each device has one OpenMP thread; otherwise, 1 device would use all cores.")
    return "\n".join(lines)


def sweep_table(results: Sequence[Result]) -> str:
    """Format a table of the final test accuracies and the best learning rate for each batch size."""
    epochs = results[0].config["epochs"]
    lrs = sorted({result.run.lr for result in results})
    rows: list[list[object]] = [["batch", "steps", *(f"lr {lr:g}" for lr in lrs), "best lr"]]
    for size, of_size in _by_size(results).items():
        accuracies = [r.epochs[-1].test_accuracy for r in of_size]
        steps, best = of_size[0].step(of_size[0].epochs[-1]), lrs[int(np.argmax(accuracies))]
        rows.append([size, steps, *(f"{accuracy:.3f}" for accuracy in accuracies), f"{best:g}"])
    return "\n".join([f"{_title(results)}: test accuracy after {epochs} epochs", *log.table(rows)])


def _by_size(results: Sequence[Result]) -> dict[int, list[Result]]:
    """Group the results of a sweep: {batch size: results in order of learning rate}."""
    return {size: [r for r in results if r.run.batch_size == size] for size in SIZES}


def draw(results: Sequence[Result], file: BinaryIO | str | Path) -> None:
    """Plot accuracy against epochs, steps and training time, as a PNG image. file: an open binary file or a path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.8, 8.5), layout="constrained")  # narrow, so that text is readable on a phone
    figure.suptitle(_title(results), fontsize="medium")
    by_epoch, by_step, by_time = figure.subplots(3, 1, sharey=True)
    # Runs with the same batch size and learning rate differ only by rounding, so a thin line is drawn over a wide line.
    colors = ("0.7", "black", "#ffd0a0", "tab:orange", "tab:blue")
    for result, color, marker, width in zip(results, colors, "o.D.^", (4, 1.2, 4, 1.2, 1.8)):
        epochs, steps = [e.epoch for e in result.epochs], [result.step(e) for e in result.epochs]
        seconds = np.cumsum([e.train_seconds for e in result.epochs])
        look = {"color": color, "marker": marker, "linewidth": width, "label": str(result.run)}
        for axes, x in ((by_epoch, epochs), (by_step, steps), (by_time, seconds)):
            axes.plot(x, [e.test_accuracy for e in result.epochs], **look)
    for axes, label in ((by_epoch, "epoch"), (by_step, "step"), (by_time, "seconds of training")):
        axes.set(xlabel=label, ylabel="test accuracy", xlim=(0, None))
        axes.grid(alpha=0.3)
    by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.legend(*by_epoch.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(file, format="png", dpi=120)


def draw_sweep(results: Sequence[Result], file: BinaryIO | str | Path) -> None:
    """Plot a sweep's final accuracies as a PNG image, once against the learning rate and once against the learning rate
    per 256 examples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 6.5), layout="constrained")
    figure.suptitle(f"{_title(results)},\n{results[0].config['epochs']} epochs", fontsize="medium")
    by_lr, by_scaled = figure.subplots(2, 1, sharey=True)
    looks = zip(("#e69f00", "#000000", "#0072b2"), "osD")  # Okabe and Ito's palette
    for (size, of_size), (color, marker) in zip(_by_size(results).items(), looks):
        lrs = np.array([r.run.lr for r in of_size])
        accuracies = [r.epochs[-1].test_accuracy for r in of_size]
        for axes, x in ((by_lr, lrs), (by_scaled, lrs * 256 / size)):
            axes.plot(x, accuracies, color=color, marker=marker, label=f"batch {size}")
    for axes, label in ((by_lr, "learning rate"), (by_scaled, "learning rate x 256 / batch size")):
        x = np.concatenate([line.get_xdata() for line in axes.lines])
        ticks = min(x) * 2 ** np.arange(1 + np.log2(max(x) / min(x)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{lr:g}" for lr in ticks])
        axes.set(xlabel=label, ylabel="test accuracy")
        axes.grid(alpha=0.3)
    figure.legend(*by_lr.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(file, format="png", dpi=120)


def _write(out: str | Path, name: str, results: Sequence[Result], draw: Callable[..., None]) -> None:
    """Write NAME.png, the picture, and NAME.csv, a table with one row per epoch of each run."""
    rows: list[list[Any]] = [
        ["devices", "batch_size", "lr", "epoch", "step", "train_seconds", "train_loss", "test_accuracy"]
    ]
    for result in results:
        r = result.run
        for e in result.epochs:
            learned = [e.train_seconds, e.train_loss, e.test_accuracy]
            rows.append([r.devices, r.batch_size, e.learning_rate, e.epoch, result.step(e), *learned])
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    files.write_whole(Path(out) / f"{name}.csv", lambda file: file.write(text.encode()))
    files.write_whole(Path(out) / f"{name}.png", lambda file: draw(results, file))


def _title(results: Sequence[Result]) -> str:
    return "{model} on {dataset}, {impl}, seed {seed}".format(**results[0].config)
