"""Manages the folder of a run: writes config.json, metrics.jsonl, curves.png and checkpoint.npz, and resumes the run.

Every update rewrites the whole file. A run is resumed from the checkpoint alone, which also holds the settings and the
history. The folder is locked while a run writes to it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gluon_mgpu import TRAINABLE, __version__
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.distributed.process import Process
from gluon_mgpu.runtime import devices, files, log
from gluon_mgpu.runtime.errors import Error, UsageError, setting, shown
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.options import FREE, MOST, SAME
from gluon_mgpu.training.settings import OPTIONS, RECORDED, Settings

if TYPE_CHECKING:
    from gluon_mgpu.training.replicas import Replicas

FORMAT = 1
CONFIG, METRICS, CURVES, CHECKPOINT = FILES = ("config.json", "metrics.jsonl", "curves.png", "checkpoint.npz")
# A notice is printed if one of these entries of config.json differs when a run is resumed.
MAY_CHANGE = [name for name in RECORDED if OPTIONS[name].on_resume == FREE and name != "epochs"]
MAY_CHANGE += ["kvstore", "compress", "workers", "devices", "threads"]
LARGEST_IMAGE = 65536  # limit on each size in image_shape
RENAMED = {  # settings in checkpoints of version 0.1.0
    "accumulate": "grad_accum_steps",
    "clip_norm": "max_grad_norm",
    "step_epochs": "milestones",
    "step_factor": "gamma",
}
SECONDS_PER_DRAWING = 60  # minimum number of seconds between updates of curves.png during a run


class Epoch(NamedTuple):
    """One line of metrics.jsonl."""

    epoch: int  # counted from 1
    train_seconds: float  # time for training, without evaluation
    samples_per_second: float
    train_loss: float  # mean over the examples; each loss is from the step that trained on the example
    test_accuracy: float  # fraction of the test set that was classified correctly
    learning_rate: float  # in the epoch's last step


@dataclass
class Position:
    """A run's progress. Together with the seed, it determines the order of the remaining examples."""

    history: list[Epoch] = field(default_factory=list)  # finished epochs
    steps: int = 0  # finished steps of the unfinished epoch
    loss_sum: float = 0.0  # sum of the examples' losses in these steps
    seconds: float = 0.0  # training time for these steps

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "history": [epoch._asdict() for epoch in self.history]}

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Position:
        """Create a position from the result of `as_json` or from a checkpoint's facts.

        Raises ValueError if a number is not finite or is out of range.
        """
        history = [Epoch(**epoch) for epoch in facts["history"]]
        steps, *sums = facts["steps"], facts["loss_sum"], facts["seconds"]
        numbers = [value for epoch in history for value in epoch] + sums
        if not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in numbers):  # nan is rejected too
            raise ValueError("a value in the history, loss_sum or seconds is not a finite number")
        if type(steps) is not int or not 0 <= steps <= MOST:
            raise ValueError(f"steps={steps!r}")
        return cls(history, steps, *sums)

    def __str__(self) -> str:
        done = [(len(self.history), "epoch"), (self.steps, "step")]
        return " and ".join(f"{n} {what}{'s'[: n != 1]}" for n, what in done if n) or "0 steps"

    def end_epoch(self, examples: int, test_accuracy: float, learning_rate: float) -> None:
        """Add the finished and evaluated epoch to the history."""
        seconds, loss, number = self.seconds, self.loss_sum / examples, len(self.history) + 1
        self.history.append(Epoch(number, seconds, examples / seconds, loss, test_accuracy, learning_rate))
        self.steps, self.loss_sum, self.seconds = 0, 0.0, 0.0


class RunFolder:
    """The folder of one run. This context manager locks the folder. Without `out` or `resume`, nothing is written.

    Raises UsageError if `out` already holds a run, if `resume` does not hold a run, or if another process is writing to
    the folder.
    """

    def __init__(self, out: str | Path | None = None, resume: str | Path | None = None) -> None:
        self.resumed, self.saves = bool(resume), bool(out or resume)
        self.name, self.folder = ("resume" if resume else "out"), Path(resume or out or os.devnull)
        self.locked: int | None = None
        self.drawn = 0.0  # time.monotonic() when curves.png was last drawn

    def __enter__(self) -> RunFolder:
        if os.path.isdir(self.folder):  # Path.is_dir fails for a name that is too long
            try:
                self._lock()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.locked is not None:
            os.close(self.locked)

    def _lock(self) -> None:
        """Lock the folder, and remove temporary files left by killed processes."""
        self.locked = files.lock(self.folder, self.name)
        if not self.resumed and exists(self.folder):
            advice = f"the folder holds a run; continue it with {setting('resume', self.folder)}, or use another folder"
            raise UsageError(self.name, self.folder, advice)
        for name in FILES:
            if not self.resumed and (self.folder / name).exists():
                advice = f"the folder contains {name}, but no checkpoint; remove {name}, or use another folder"
                raise UsageError(self.name, self.folder, advice)
        for name in FILES:
            files.remove_partial(self.folder / name)

    def start(self, settings: Settings) -> tuple[Settings, Position, dict[str, np.ndarray] | None]:
        """Returns (settings, position, arrays) to start with; arrays is None for a new run."""
        if not self.resumed:
            return settings, Position(), None
        arrays, self.config, recorded, position = last(self.folder)
        if settings.epochs < len(position.history):
            least = f"must be at least {len(position.history)}, the number of finished epochs"
            raise UsageError("epochs", settings.epochs, least)
        changed = settings.epochs != recorded.epochs
        epochs = f"; epochs: {settings.epochs} instead of {recorded.epochs}" if changed else ""
        log.say(f"resuming {self.folder} after {position}{epochs}")
        if settings.epochs == len(position.history):
            longer = f"; pass {setting('epochs', settings.epochs + 1)} or more to train longer"
            log.say(f"all epochs are finished{'' if recorded.schedule == 'cosine' else longer}")
        return settings, position, arrays

    def begin(self, config: dict[str, Any], replicas: Replicas, position: Position) -> None:
        """Create and lock the folder when training begins. config: the content of config.json."""
        if not self.saves:
            return
        config = json.loads(json.dumps({**config, "version": __version__}))  # the form that `last` reads back
        if self.resumed:
            _say_what_changed(self.config, config, bool(replicas.running_stats))
        self.config = config
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()  # fail now, not after the first epoch
        except OSError as error:
            option = setting(self.name, self.folder)
            raise Error(f"{option}: cannot write to the folder ({error.strerror}); use another folder") from None
        if self.locked is None:
            self._lock()
        if self.resumed:
            self.save(replicas, position)  # so that the next resume uses the new configuration

    def save(self, replicas: Replicas, position: Position) -> None:
        """Write checkpoint.npz, config.json and metrics.jsonl."""
        facts = {"format": FORMAT, "config": self.config, **position.as_json()}
        checkpoint.save(self.folder / CHECKPOINT, replicas.state_dict(), facts)
        self._write_text(position)

    def end_epoch(self, replicas: Replicas, position: Position) -> None:
        """Save a checkpoint, and sometimes draw the curves."""
        if not self.saves:
            return
        self.save(replicas, position)
        if time.monotonic() - self.drawn > SECONDS_PER_DRAWING:
            self._draw(position)

    def end(self, position: Position) -> None:
        """Write the final metrics and curves."""
        if self.saves:
            self._write_text(position)
            self._draw(position)

    def interrupt(self, replicas: Replicas, position: Position) -> str:
        """Save a checkpoint of an interrupted run. Returns one line that says what was saved."""
        if not self.saves:
            return f"interrupted after {position}; nothing was saved"
        self.save(replicas, position)
        if position.history:
            self._draw(position)
        return f"interrupted after {position}; checkpoint saved; continue with {setting('resume', self.folder)}"

    def _write_text(self, position: Position) -> None:
        config = json.dumps(self.config, indent=2) + "\n"
        metrics = "".join(json.dumps(epoch._asdict()) + "\n" for epoch in position.history)
        files.write_whole(self.folder / CONFIG, lambda file: file.write(config.encode()))
        files.write_whole(self.folder / METRICS, lambda file: file.write(metrics.encode()))

    def _draw(self, position: Position) -> None:
        """Plot loss and accuracy against epochs."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure, history = Figure(figsize=(8, 3.2), layout="constrained"), position.history
        losses, accuracies = [e.train_loss for e in history], [e.test_accuracy for e in history]
        panels = (("training loss", losses), ("test accuracy", accuracies))
        for axes, (title, values) in zip(figure.subplots(1, 2), panels):
            axes.plot([e.epoch for e in history], values, marker="o")
            axes.set(ylabel=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.grid(alpha=0.3)
        files.write_whole(self.folder / CURVES, lambda file: figure.savefig(file, format="png", dpi=120))
        self.drawn = time.monotonic()


def _say_what_changed(old: dict[str, Any], new: dict[str, Any], running_stats: bool) -> None:
    """Print a notice if an entry in MAY_CHANGE has changed in a resumed run."""

    def text(name: str, value: Any) -> Any:
        return shown(value) if value is not None else "even" if name == "shares" else "none"

    changed = [name for name in MAY_CHANGE if name in old and name in new and old[name] != new[name]]
    if changed:
        effect = "results are the same except for rounding"
        if running_stats and {"devices", "shares", "workers"} & {*changed}:
            effect = "results differ, because batch normalization sees only the examples of one shard"
        changes = [f"{name} {text(name, new[name])} instead of {text(name, old[name])}" for name in changed]
        log.say(f"{', '.join(changes)}: {effect}")


def last(folder: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any], Settings, Position]:
    """Read (arrays, config, settings, position) from the checkpoint of the run in a folder.

    Raises UsageError if the folder does not hold a run, Error if the checkpoint is damaged or from an unknown version.
    """
    if not exists(folder):
        raise UsageError(None, folder, _no_run(Path(folder)))
    path = Path(folder) / CHECKPOINT
    arrays, facts = checkpoint.load(path)
    try:
        if facts.get("format") != FORMAT:
            raise Error(f"{path} was written by another version of gluon_mgpu: use that version")
        config, position = facts["config"], Position.from_json(facts)
        config = {RENAMED.get(name, name): value for name, value in config.items()}
        settings = Settings(**{name: config[name] for name in RECORDED if name in config})
        _devices(config)
        shape = tuple(config.get("image_shape", IMAGE_SHAPE))  # older runs have not recorded it
        if len(shape) != 3 or any(type(size) is not int or not 1 <= size <= LARGEST_IMAGE for size in shape):
            raise ValueError(f"image_shape {shape}")
        config["image_shape"] = shape
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, UsageError) as error:
        raise Error(f"{path}: invalid run configuration ({error}); start the run again in another folder") from None
    return arrays, config, settings, position


def _no_run(folder: Path) -> str:
    """Explain why a path is not the folder of a run, and what to do."""
    if folder.is_file():
        return f"a file; pass the run's folder, such as {folder.parent}"
    runs = sorted(path.parent for path in folder.glob(f"*/{CHECKPOINT}"))
    if runs:
        return f"not a run; did you mean {runs[0]}?"
    return "not a run: it has no checkpoint; pass the folder of a run, such as runs/first"


def _devices(config: dict[str, Any]) -> list[tuple[str, int]]:
    """Parse the devices in a config into a list: [("cpu", 0), ("cpu", 1)]. Raises ValueError if they are invalid."""
    found = re.findall(r"(cpu|gpu)\((\d+)\)", " ".join(config["devices"]))
    if not found or len(found) != len(config["devices"]):
        raise ValueError(f"devices {config['devices']}")
    return [(kind, int(index)) for kind, index in found]


def exists(folder: str | Path) -> bool:
    """Whether the folder holds a run, that is, a checkpoint, even a damaged one."""
    return os.path.lexists(Path(folder) / CHECKPOINT)


def recorded_options(folder: str | Path) -> dict[str, Any]:
    """The settings that the run in `folder` has recorded, including its devices."""
    _, config, settings, _ = last(folder)
    kinds, indices = zip(*_devices(config))
    return {**settings.recorded(), "num_gpus": list(indices), "device": kinds[0]}


def starting_settings(given: dict[str, Any], here: Process) -> Settings:
    """The settings that this process starts with: those that the caller gave and, in a resumed run, the recorded ones.

    given: {name: value}. here: this process; only worker 0 needs to be able to read the run's folder.
    Raises UsageError if a given setting differs from the recorded one, and is not one that may change.
    """
    folder = given.get("resume")
    if folder is None or (here.rank > 0 and not Path(folder).is_dir()):
        return Settings(**given)
    recorded = recorded_options(folder)
    for name, value in given.items():
        if name == "seed" and value is None:
            continue
        value = tuple(value) if isinstance(value, list) else value
        if name == "epochs" and recorded["schedule"] == "cosine" and value != recorded[name]:
            advice = f"the run's cosine schedule ends at epoch {recorded[name]}; omit this setting"
            raise UsageError(name, value, advice)
        if OPTIONS[name].on_resume == SAME and value != recorded[name]:
            raise UsageError(name, value, f"the run in {folder} used {shown(recorded[name])}; omit this setting")
    if "impl" not in given and recorded["impl"] not in TRAINABLE:
        advice = f"the run used your own lesson, {recorded['impl']}; pass it with {setting('impl')}"
        raise UsageError("resume", folder, advice)
    merged = {**recorded, **given, "seed": recorded["seed"]}
    other_devices = here.workers > 1 or len(devices.parse(merged["num_gpus"])) != len(recorded["num_gpus"])
    if other_devices and "shares" not in given:
        merged["shares"] = None
    return Settings(**merged)


def restore(replicas: Replicas, arrays: dict[str, np.ndarray], folder: str | Path) -> None:
    """Load the arrays of the checkpoint in `folder` into the replicas. Raises Error if they do not match the
    network."""
    try:
        replicas.load_state_dict(arrays)
    except Error as error:
        raise Error(f"{Path(folder) / CHECKPOINT}: {error}") from None
