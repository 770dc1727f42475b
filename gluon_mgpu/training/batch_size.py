"""The lecture's experiment: how much time a second device saves, and how a larger batch changes the accuracy.

Runs `train` four times, each time in a new process, because the engine's settings depend on the number of
contexts. Source: the lecture "L14_6 Multi-GPU Training in Python".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from gluon_mgpu.runtime import devices, log, subprocesses
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import checkpoint, datasets, records
from gluon_mgpu.training.records import Epoch
from gluon_mgpu.training.settings import Settings

PICTURE = "batch-size.png"


class Run(NamedTuple):
    """The settings that differ between the runs."""

    devices: int
    batch_size: int  # over all devices
    scale_lr: bool = False  # scale the learning rate with the batch size

    def __str__(self) -> str:
        device = "1 device" if self.devices == 1 else f"{self.devices} devices"
        return f"{device}, batch {self.batch_size}{', lr scaled' if self.scale_lr else ''}"

    @property
    def folder(self) -> str:
        return str(self).replace(",", "").replace(" ", "-")


RUNS = (Run(1, 256), Run(2, 256), Run(2, 512), Run(2, 512, scale_lr=True))


class Result(NamedTuple):
    run: Run
    config: dict[str, Any]  # config.json
    epochs: list[Epoch]


def run(
    out: str | Path,
    *,
    impl: str = "scratch",
    device: str = "auto",
    data_dir: str | Path | None = None,
    seed: int = 1,
    **settings: Any,
) -> list[Result]:
    """Train each of RUNS in its own subfolder of `out`, and draw PICTURE in `out`.

    impl, device, data_dir: as for `train`. seed, settings: fields of `Settings`. All runs have the same seed, so they
    start from the same parameters. On CPU, each context gets one OpenMP thread, even if it is the only context.
    Finished runs are skipped, and interrupted runs continue.
    Raises UsageError if settings or devices are invalid, or if `out` holds runs with different options; Error if the
    data is not available or a run fails.
    """
    checked, *_ = [Settings(r.batch_size, scale_lr=r.scale_lr, seed=seed, **settings) for r in RUNS]
    ctx = devices.contexts(max(r.devices for r in RUNS), device)
    devices.say_if_no_gpu(ctx, device)
    datasets.load(checked.dataset, data_dir, checked.limit, seed)  # downloads the data set if necessary
    kind = ctx[0].device_type
    env = {"OMP_NUM_THREADS": "1"} if kind == "cpu" else {}
    common = {"impl": impl, "device": kind, "data_dir": data_dir, "seed": seed, "epochs": checked.epochs, **settings}
    results = []
    with log.progress(total=len(RUNS) * checked.epochs, unit="epoch") as bar:
        for r in RUNS:
            bar.set_description(str(r))
            folder = Path(out) / r.folder
            options = {**common, "gpus": r.devices, "batch_size": r.batch_size, "scale_lr": r.scale_lr}
            epochs = finish(str(r), folder, options, bar.update, env)
            results.append(Result(r, json.loads((folder / "config.json").read_text()), epochs))
    checkpoint.write_whole(Path(out) / PICTURE, lambda file: draw(results, file))
    return results


def finish(
    name: str,
    folder: Path,
    options: dict[str, Any],
    on_epochs: Callable[[int], object],
    env: Mapping[str, str] | None = None,
) -> list[Epoch]:
    """Train a run in its own process. Continues an interrupted run, and skips a finished run. Returns the run's epochs.

    name: used in error messages. options: arguments of `train`, including epochs, gpus and device. on_epochs: called
    with the number of newly finished epochs. env: added to the environment. Raises UsageError if the folder holds a
    different run, Error if the run fails.
    """
    begun = (folder / "config.json").exists()
    if begun:
        _check_same(folder, options)
    finished = records.last(folder)[-1].history if begun else []
    on_epochs(len(finished))
    if len(finished) == options["epochs"]:
        return finished
    command = {**options, "resume" if begun else "out": folder}
    try:
        subprocesses.gluon_mgpu(
            name, "train", command, on_line=lambda line: on_epochs(line.startswith("epoch ")), env=env
        )
    except KeyboardInterrupt:
        log.say("run the same command again to continue")
        raise
    return records.last(folder)[-1].history


def _check_same(folder: Path, options: dict[str, Any]) -> None:
    """Raise UsageError if the run in `folder` has different options. It may have fewer epochs, and then continues."""
    found, wanted = records.options(folder), {**options, "gpus": devices.parse(options["gpus"])}
    if found["epochs"] < wanted["epochs"]:
        del wanted["epochs"]
    differ = [f"{o} {found[o]}, not {value}" for o, value in wanted.items() if o in found and found[o] != value]
    if differ:
        raise UsageError(f"{folder} holds a different run ({'; '.join(differ)}); use another folder")


def table(results: Sequence[Result]) -> str:
    """Format each run's median seconds per epoch, speed-up over the first run, and accuracies."""
    lines = [_title(results), f"{'':32}   lr  s/epoch  speed-up  test accuracy by epoch"]
    seconds = [median(e.train_seconds for e in result.epochs) for result in results]
    for result, s in zip(results, seconds):
        accuracies = "  ".join(f"{e.test_accuracy:.2f}" for e in result.epochs)
        lr = result.epochs[-1].learning_rate
        lines.append(f"{result.run!s:32}{lr:5g}{s:9.2f}{seconds[0] / s:10.2f}  {accuracies}")
    if results[0].config["devices"] == ["cpu(0)"]:
        lines.append("On CPU, each device has one OpenMP thread; 1 device would otherwise use all cores.")
    return "\n".join(lines)


def draw(results: Sequence[Result], file: BinaryIO | str | Path) -> None:
    """Draw accuracy by epoch and by seconds of training, as a PNG image. file: an open binary file or a path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle(_title(results), fontsize="medium")
    by_epoch, by_time = figure.subplots(1, 2, sharey=True)
    # The first two runs differ only by rounding, so the second line is thin and lies on the wide first line.
    looks = (("0.7", "o", 4), ("black", ".", 1.2), ("tab:orange", "s", 1.8), ("tab:blue", "^", 1.8))
    for (r, _, epochs), (color, marker, width) in zip(results, looks):
        accuracies = [e.test_accuracy for e in epochs]
        look = {"color": color, "marker": marker, "linewidth": width, "label": str(r)}
        by_epoch.plot([e.epoch for e in epochs], accuracies, **look)
        by_time.plot(np.cumsum([e.train_seconds for e in epochs]), accuracies, **look)
    by_epoch.set(xlabel="epoch", ylabel="test accuracy")
    by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    by_epoch.legend()
    by_time.set(xlabel="seconds of training", xlim=(0, None))
    for axes in (by_epoch, by_time):
        axes.grid(alpha=0.3)
    figure.savefig(file, format="png", dpi=120)


def _title(results: Sequence[Result]) -> str:
    return "{model} on {dataset}, {impl}, seed {seed}".format(**results[0].config)
