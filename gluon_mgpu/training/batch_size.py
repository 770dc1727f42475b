"""The lecture's experiment: what a second device buys, and what the larger batch that it wants does to the accuracy.

Four runs of `train`, each in a process of its own, one after the other: what the engine is set to depends on the number
of contexts. Source: the lecture "L14_6 Multi-GPU Training in Python".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from gluon_mgpu.runtime import subprocesses as own_process
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import checkpoint, datasets, records
from gluon_mgpu.training.records import Epoch
from gluon_mgpu.training.settings import Settings

PICTURE = "batch-size.png"


class Run(NamedTuple):
    """One of the runs; what the four have in common is an argument of `run`."""

    devices: int
    batch_size: int  # over all devices together
    scale_lr: bool = False  # the learning rate grows with the batch

    def __str__(self) -> str:
        device = "1 device" if self.devices == 1 else f"{self.devices} devices"
        return f"{device}, batch {self.batch_size}{', lr scaled' * self.scale_lr}"

    @property
    def folder(self) -> str:
        return str(self).replace(",", "").replace(" ", "-")


RUNS = (Run(1, 256), Run(2, 256), Run(2, 512), Run(2, 512, scale_lr=True))


class Result(NamedTuple):
    run: Run
    config: dict[str, Any]  # of config.json
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
    """Train all of RUNS, each into a folder of its own in out, and draw the picture there; returns a list of `Result`.

    impl, device, data_dir: as of `train`. seed, settings: fields of `Settings` that the runs have in common; from one
    seed all start with the same parameters. On CPU every context gets one OpenMP thread, also where it is alone.
    An experiment that ended early goes on: what is there already is not trained again.
    Raises, before anything is trained, UsageError for settings or devices that cannot be, Error where the data cannot
    be had; then either, in the run's own words, for a run that fails.
    """
    out = Path(out)
    checked, *_ = [Settings(r.batch_size, scale_lr=r.scale_lr, seed=seed, **settings) for r in RUNS]
    datasets.load(checked.dataset, data_dir, checked.limit, seed)  # fetched, where it has to be, with its progress
    trial = {"dataset": "synthetic", "limit": 2, "batch_size": 2, "epochs": 1}  # says which devices there are
    device = (
        "gpu"
        if "gpu(0)" in own_process.train("2 devices", {"impl": impl, "gpus": 2, "device": device, **trial})
        else "cpu"
    )
    environment = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    common = {"impl": impl, "device": device, "data_dir": data_dir, "seed": seed, **settings}
    with tqdm(total=len(RUNS) * checked.epochs, unit="epoch", leave=False, disable=not sys.stderr.isatty()) as bar:
        for r in RUNS:
            bar.set_description(str(r))
            again = (out / r.folder / "config.json").exists()
            if again and _finished(r, out / r.folder, impl, seed, settings):
                bar.update(checked.epochs)
                continue
            where = {"resume" if again else "out": out / r.folder}
            own = {"gpus": r.devices, "batch_size": r.batch_size, "scale_lr": r.scale_lr, **where}
            try:
                own_process.train(str(r), {**common, **own}, bar.update, **environment)
                # One that was done, of another --impl, is left as it is.
                if again and not _finished(r, out / r.folder, impl, seed, settings):
                    raise UsageError(f"--out {out} has {r.folder} of another experiment")
            except UsageError as error:
                raise UsageError(f"{error}; give another --out than {out}" if again else str(error)) from None
            except KeyboardInterrupt:
                tqdm.write("gluon_mgpu: the same command goes on from here", file=sys.stderr)
                raise
    results = [_result(r, out / r.folder) for r in RUNS]
    checkpoint.write_whole(out / PICTURE, lambda file: draw(results, file))
    return results


def table(results: Sequence[Result]) -> str:
    """Lines for a terminal: for each run the median seconds of an epoch, how many times as fast that is as the first
    run, and its accuracies."""
    lines = [_title(results), f"{'':32}   lr  s/epoch  speed-up  test accuracy by epoch"]
    seconds = [median(e.train_seconds for e in result.epochs) for result in results]
    for result, s in zip(results, seconds):
        accuracies = "  ".join(f"{e.test_accuracy:.2f}" for e in result.epochs)
        lr = result.epochs[-1].learning_rate
        lines.append(f"{result.run!s:32}{lr:5g}{s:9.2f}{seconds[0] / s:10.2f}  {accuracies}")
    if results[0].config["devices"] == ["cpu(0)"]:
        lines.append("On CPU every device has one OpenMP thread: 1 device would otherwise use all cores.")
    return "\n".join(lines)


def draw(results: Sequence[Result], file: BinaryIO | str | Path) -> None:
    """Accuracy by epoch, and against the seconds of training, as a PNG picture. file: binary and open, or a path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 4.4))
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.22, top=0.91, wspace=0.06)
    figure.suptitle(_title(results), fontsize="medium")
    by_epoch, by_time = figure.subplots(1, 2, sharey=True)
    # The first two runs agree to rounding: the second's narrow line lies on, or near, the first's wide one.
    looks = (("0.7", "o", 4), ("black", ".", 1.2), ("tab:orange", "s", 1.8), ("tab:blue", "^", 1.8))
    for (r, _, epochs), (color, marker, width) in zip(results, looks):
        accuracies = [e.test_accuracy for e in epochs]
        look = {"color": color, "marker": marker, "linewidth": width, "label": str(r)}
        by_epoch.plot([e.epoch for e in epochs], accuracies, **look)
        by_time.plot(np.cumsum([e.train_seconds for e in epochs]), accuracies, **look)
    by_epoch.set(xlabel="epoch", ylabel="test accuracy")
    by_epoch.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    by_time.set(xlabel="seconds of training", xlim=(0, None))
    figure.legend(*by_epoch.get_legend_handles_labels(), loc="lower center", ncol=len(results), frameon=False)
    for axes in (by_epoch, by_time):
        axes.grid(alpha=0.3)
    figure.savefig(file, format="png", dpi=120)


def _title(results: Sequence[Result]) -> str:
    return "{model} on {dataset}, {impl}, seed {seed}".format(**results[0].config)


def _finished(r: Run, folder: Path, impl: str, seed: int, settings: dict[str, Any]) -> bool:
    """Whether a folder holds this run, and all of it."""
    arrays, config, kept, position = records.last(folder)
    wanted = Settings(r.batch_size, scale_lr=r.scale_lr, seed=seed, **settings)
    return (
        arrays is not None
        and (config["impl"], len(config["devices"]), kept) == (impl, r.devices, wanted)
        and len(position.history) == wanted.epochs == len(_lines(folder))
    )


def _result(r: Run, folder: Path) -> Result:
    epochs = [Epoch(**json.loads(line)) for line in _lines(folder)]
    return Result(r, json.loads((folder / "config.json").read_text()), epochs)


def _lines(folder: Path) -> list[str]:
    """A run that was killed may lack the last one, which it writes when it is resumed."""
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []
