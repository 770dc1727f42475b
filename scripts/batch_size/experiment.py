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

from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets
from gluon_mgpu.support import files, log, subprocesses
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.training import folder as runs
from gluon_mgpu.training.config import RECORDED, Config
from gluon_mgpu.training.folder import Epoch

PICTURE = "batch-size.png"


class Variant(NamedTuple):
    """The settings that differ between the runs."""

    gpus: int
    batch_size: int  # across all devices
    scale_lr: bool = False  # multiply the learning rate by batch_size / 256

    def __str__(self) -> str:
        scaled = ", lr scaled" if self.scale_lr else ""
        return f"{self.gpus} {log.plural(self.gpus, 'device')}, batch {self.batch_size}{scaled}"


RUNS = (Variant(1, 256), Variant(2, 256), Variant(1, 512), Variant(2, 512), Variant(2, 512, scale_lr=True))


class Result(NamedTuple):
    variant: Variant
    config: dict[str, Any]  # content of config.json
    epochs: list[Epoch]

    def step(self, epoch: Epoch) -> int:
        """The number of steps from the start of the run to the end of an epoch."""
        examples = round(epoch.samples_per_second * epoch.train_seconds)
        return epoch.epoch * -(-examples // self.variant.batch_size)


def run(out: str | Path, device: str = "auto", **options: Any) -> list[Result]:
    """Train all runs in RUNS, each in its own folder in `out`, and write a picture to `out`. Finished
    runs are skipped, and interrupted runs continue.

    options: fields of Config. All runs start from the same parameters. On CPU, each context gets one OpenMP
    thread, even if it is the only context. Raises UsageError if options are invalid, or if `out` holds runs with
    different options. Raises Error if the data is not available or a run fails.
    """
    options = {"seed": 1, **options}
    config = Config(**options)
    ctx = devices.contexts(max(variant.gpus for variant in RUNS), device)
    devices.say_if_no_gpu(ctx, device)
    datasets.load(config.dataset, config.data_dir, config.limit, config.seed)  # downloads the data set if necessary
    kind = ctx[0].device_type
    env = {"OMP_NUM_THREADS": "1"} if kind == "cpu" else {}
    results = []
    with log.progress(total=len(RUNS) * config.epochs, unit="epoch") as bar:
        for variant in RUNS:
            bar.set_description(str(variant))
            folder = Path(out, str(variant).replace(",", "").replace(" ", "-"))
            made = finish(str(variant), folder, {**options, **variant._asdict(), "device": kind}, bar.update, env)
            assert made.recorded
            settings = {**made.recorded.recorded(), **made.details}
            results.append(Result(variant, settings, made.position.history))
    files.write_whole(Path(out, PICTURE), lambda file: draw(results, file))
    return results


def finish(
    name: str,
    folder: Path,
    options: dict[str, Any],
    on_epochs: Callable[[int], object],
    env: Mapping[str, str] | None = None,
) -> runs.RunFolder:
    """Train a run in its own process. Continues an interrupted run, and skips a finished run. Returns the run.

    name: used in error messages. options: fields of Config. on_epochs: called with the number of newly finished
    epochs. Raises UsageError if the folder holds a different run, Error if the run fails.
    """
    config, begun = Config(**options), runs.exists(folder)
    if begun:
        run = runs.read(folder)
        assert run.recorded
        other = {name for name in RECORDED - {"epochs"} if getattr(config, name) != getattr(run.recorded, name)}
        if other or run.recorded.epochs > config.epochs:
            raise UsageError(
                None, folder, f"holds a run with other {', '.join(other or ['epochs'])}; use another folder"
            )
        on_epochs(len(run.position.history))
        if len(run.position.history) == config.epochs:
            return run
    command = {**options, "resume" if begun else "out": folder}
    given = {option: value for option, value in command.items() if value is not None and value is not False}
    flags = [f"--{o.replace('_', '-')}" + ("" if value is True else f"={value}") for o, value in given.items()]
    try:
        finished = subprocesses.run(
            [sys.executable, "-m", "gluon_mgpu", "train", *flags],
            env={**subprocesses.users_environment(), **(env or {})},
            on_line=lambda line: on_epochs(line.startswith("epoch ")),
        )
    except KeyboardInterrupt:
        log.say("run the same command again to continue")
        raise
    subprocesses.raise_for_status(name, finished)
    return runs.read(folder)


def table(results: Sequence[Result]) -> str:
    """Format a table of each run's median seconds per epoch, speed-up over the first run, and accuracies."""
    seconds = [median(e.train_seconds for e in result.epochs) for result in results]
    rows: list[list[object]] = [["", "lr", "s/epoch", "speed-up", "test accuracy by epoch"]]
    for result, s in zip(results, seconds):
        accuracies = "  ".join(f"{e.test_accuracy:.2f}" for e in result.epochs)
        lr = result.epochs[-1].learning_rate
        rows.append([result.variant, f"{lr:g}", f"{s:.2f}", f"{seconds[0] / s:.2f}", accuracies])
    lines = [_title(results), *log.table(rows)]
    if results[0].config["devices"] == ["cpu(0)"]:
        lines.append("On CPU, each device has one OpenMP thread; otherwise, 1 device would use all cores.")
    return "\n".join(lines)


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
        look = {"color": color, "marker": marker, "linewidth": width, "label": str(result.variant)}
        for axes, x in ((by_epoch, epochs), (by_step, steps), (by_time, seconds)):
            axes.plot(x, [e.test_accuracy for e in result.epochs], **look)
    for axes, label in ((by_epoch, "epoch"), (by_step, "step"), (by_time, "seconds of training")):
        axes.set(xlabel=label, ylabel="test accuracy", xlim=(0, None))
        axes.grid(alpha=0.3)
    by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.legend(*by_epoch.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(file, format="png", dpi=120)


def _title(results: Sequence[Result]) -> str:
    return "{model} on {dataset}, {impl}, seed {seed}".format(**results[0].config)
