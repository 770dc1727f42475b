"""A run: a training with its progress and its folder. Only this module reads and writes run folders.

A folder holds config.json, metrics.jsonl, curves.png and checkpoint.npz. Every update rewrites the whole file. A run is
resumed from the checkpoint alone, which also holds the configuration and the history.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gluon_mgpu import __version__
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.support import files, log
from gluon_mgpu.support.errors import Error, UsageError, setting, shown
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.checkpoint import STATE, Arrays
from gluon_mgpu.training.config import RECORDED, SETTINGS, Config
from gluon_mgpu.training.workers import Group

if TYPE_CHECKING:
    from gluon_mgpu.training.model import Model

FORMAT = 1
CONFIG, METRICS, CURVES, CHECKPOINT = FILES = ("config.json", "metrics.jsonl", "curves.png", "checkpoint.npz")
# What a run records besides its settings
CHANGEABLE = ("workers", "devices", "threads", "version", "mxnet", "numpy", "python")
DATA = ("data", "data_checksum", "image_shape", "image_dtype", "classes", "running_stats")
DETAILS = {*CHANGEABLE, *DATA}
LARGEST_IMAGE = 65536  # limit on each size in image_shape
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
    def from_json(cls, values: dict[str, Any]) -> Position:
        """Create a position from the result of `as_json`. Raises ValueError if a number is not finite or is out of
        range."""
        history = [Epoch(**epoch) for epoch in values["history"]]
        steps, *sums = values["steps"], values["loss_sum"], values["seconds"]
        numbers = [value for epoch in history for value in epoch] + sums
        if not all(type(n) in (int, float) and abs(n) <= sys.float_info.max for n in numbers):  # nan is rejected too
            raise ValueError("a value in the history, loss_sum or seconds is not a finite number")
        if type(steps) is not int or steps < 0:
            raise ValueError(f"steps={steps!r}")
        return cls(history, steps, *sums)

    def __str__(self) -> str:
        done = [(len(self.history), "epoch"), (self.steps, "step")]
        return " and ".join(f"{n} {log.plural(n, what)}" for n, what in done if n) or "0 steps"

    def end_epoch(self, examples: int, test_accuracy: float, learning_rate: float) -> Epoch:
        """Add the finished and evaluated epoch to the history."""
        seconds, loss, number = self.seconds, self.loss_sum / examples, len(self.history) + 1
        self.history.append(Epoch(number, seconds, examples / seconds, loss, test_accuracy, learning_rate))
        self.steps, self.loss_sum, self.seconds = 0, 0.0, 0.0
        return self.history[-1]


@dataclass
class RunFolder:
    """folder: None if nothing is saved, also in workers other than worker 0. position: the progress.

    recorded: the settings in the folder; None in a new run. details: what config.json holds besides the settings, such
    as the image shape; {} in a new run until `begin`. arrays: of the checkpoint, as in `Model.arrays`, and the
    lesson's state; None in a new run, and once a model has loaded them.
    """

    folder: Path | None = None
    position: Position = field(default_factory=Position)
    recorded: Config | None = None
    details: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays | None = None
    _settings: dict[str, Any] = field(default_factory=dict)  # what config.json holds, without the details
    _lock: int | None = None
    _drawn: float = 0.0  # time.monotonic() when curves.png was last drawn

    def configure(self, given: dict[str, Any]) -> Config:
        """The settings of this run, which are the recorded ones if it is resumed. Says that a run is resumed.

        given: the settings that the user passed, as `Config.parse` returns them. Raises UsageError if they are
        invalid, or contradict the recorded ones.
        """
        if self.recorded is None:
            return Config(**given)
        config, done = self.recorded.resumed(given), len(self.position.history)
        if config.epochs < done:
            raise UsageError("epochs", config.epochs, f"must be at least {done}, the number of finished epochs")
        changed = config.epochs != self.recorded.epochs
        instead = f"; epochs: {config.epochs} instead of {self.recorded.epochs}" if changed else ""
        log.say(f"resuming {config.resume} after {self.position}{instead}")
        if config.epochs == done:
            longer = f"; pass {setting('epochs', done + 1)} or more to train longer"
            log.say(f"all epochs are finished{'' if config.schedule == 'cosine' else longer}")
            self._settings["epochs"] = done  # nothing else changes a finished run
            if changed:
                self.save(self.arrays or {})
        return config

    def lock(self) -> None:
        """Lock the folder, and remove temporary files left by killed processes.

        Raises UsageError if another process is writing to the folder, or if a new run would overwrite a run."""
        if self.folder is None or self._lock is not None:
            return
        self._lock = files.lock(self.folder, "out" if self.recorded is None else "resume")
        for name in FILES[::-1] if self.recorded is None else ():
            if os.path.lexists(self.folder / name):
                resume = f"continue it with {setting('resume', self.folder)}, or "
                holds = "a run; " + resume if name == CHECKPOINT else f"{name}, but no checkpoint; remove it, or "
                raise UsageError("out", self.folder, f"the folder holds {holds}use another folder")
        for name in FILES:
            files.remove_partial(self.folder / name)

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin(self, config: Config, details: dict[str, Any]) -> None:
        """Create and lock the folder, when training begins. config: the settings. details: what to record besides
        them."""
        details = json.loads(json.dumps({**details, "version": __version__}))  # the form that `read` returns
        settings = json.loads(json.dumps(config.recorded()))
        if self.recorded is not None:
            self._say_what_changed({**settings, **details})
        self._settings, self.details = settings, details
        if self.folder is None:
            return
        try:
            import matplotlib.figure  # noqa: F401  # which curves.png needs after the first epoch
        except ValueError:
            raise UsageError("MPLBACKEND", os.environ.get("MPLBACKEND"), "not a backend of Matplotlib") from None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()  # fail now, not after the first epoch
        except OSError as error:
            option = setting("out" if self.recorded is None else "resume", self.folder)
            raise Error(f"{option}: cannot write to the folder ({error.strerror}); use another folder") from None
        self.lock()

    def restore(self, model: Model) -> Arrays:
        """Give a model the arrays of the checkpoint, if any. Returns those that the lesson itself keeps. Raises Error
        if the others do not match the network."""
        arrays, self.arrays = self.arrays or {}, None
        of_lesson = {name: arrays.pop(name) for name in [*arrays] if name.startswith(STATE)}
        try:
            if arrays:
                model.load(arrays)
        except Error as error:
            raise Error(f"{self.folder}: {error}") from None
        return of_lesson

    def save(self, arrays: Arrays) -> None:
        """Write checkpoint.npz, config.json and metrics.jsonl."""
        if self.folder is None:
            return
        content = {"format": FORMAT, "config": {**self._settings, **self.details}, **self.position.as_json()}
        checkpoint.save(self.folder / CHECKPOINT, arrays, content)
        self._write_text()
        if self.position.history and time.monotonic() - self._drawn > SECONDS_PER_DRAWING:
            self._draw()

    def end(self) -> None:
        """Write the final metrics and curves."""
        if self.folder is not None:
            self._write_text()
            if self.position.history:
                self._draw()

    def _say_what_changed(self, new: dict[str, Any]) -> None:
        """Print a notice if something that may change has changed in a resumed run. new: settings and details."""
        names = [name for name in sorted(SETTINGS) if SETTINGS[name].changeable and name != "epochs"]
        old = {**self._settings, **self.details}
        changed = [name for name in (*names, *CHANGEABLE) if name in old and old[name] != new.get(name, old[name])]
        if changed:
            effect = "results are the same except for rounding, and for random numbers in a step"
            if "impl" in changed:
                effect = "the other lesson continues the run"
            elif new["running_stats"] and {"devices", "shares", "workers"} & {*changed}:
                effect = "results differ, because batch normalization sees only the examples of one shard"
            changes = [f"{name} {shown(new[name])} instead of {shown(old[name])}" for name in changed]
            log.say(f"{', '.join(changes)}: {effect}")

    def _write_text(self) -> None:
        assert self.folder is not None
        config = json.dumps({**self._settings, **self.details}, indent=2) + "\n"
        metrics = "".join(json.dumps(epoch._asdict()) + "\n" for epoch in self.position.history)
        files.write_whole(self.folder / CONFIG, lambda file: file.write(config.encode()))
        files.write_whole(self.folder / METRICS, lambda file: file.write(metrics.encode()))

    def _draw(self) -> None:
        """Plot loss and accuracy against epochs."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        assert self.folder is not None
        figure, history = Figure(figsize=(8, 3.2), layout="constrained"), self.position.history
        losses, accuracies = [e.train_loss for e in history], [e.test_accuracy for e in history]
        panels = (("training loss", losses), ("test accuracy", accuracies))
        for axes, (title, values) in zip(figure.subplots(1, 2), panels):
            axes.plot([e.epoch for e in history], values, marker="o")
            axes.set(ylabel=title, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.grid(alpha=0.3)
        files.write_whole(self.folder / CURVES, lambda file: figure.savefig(file, format="png", dpi=120))
        self._drawn = time.monotonic()


@contextmanager
def open_run(options: dict[str, Any], group: Group) -> Iterator[RunFolder]:
    """Open a new run, or the one to resume; all workers use worker 0's run. Its folder stays locked inside the `with`
    block.

    options: as `Config.parse` returns them. Raises UsageError if the folder holds no run to resume, or a run that a new
    one would overwrite, or if the options differ between workers; Error if the checkpoint is damaged.
    """
    if group.size > 1:
        texts = {setting(name): str(value) for name, value in options.items()}
        group.agree({"version": __version__, **texts}, "start all workers with the same options and version")
    run = RunFolder()
    try:
        if group.rank == 0 and options.get("resume") is not None:
            run = read(options["resume"], lock=True)
        elif group.rank == 0 and options.get("out") is not None:
            run.folder = Path(options["out"])
            if os.path.isdir(run.folder):  # Path.is_dir fails for a name that is too long
                run.lock()
        yield run if group.size == 1 else _of_worker_0(run, group)
    finally:
        run.unlock()


def _of_worker_0(run: RunFolder, group: Group) -> RunFolder:
    """Worker 0's run. The other workers do not have its folder."""
    recorded = run.recorded and vars(run.recorded)
    start = group.broadcast({"recorded": recorded, "position": run.position.as_json(), "details": run.details})
    if group.rank == 0:
        return run
    config = Config(**Config.parse(start["recorded"])) if start["recorded"] else None
    return RunFolder(None, Position.from_json(start["position"]), config, start["details"])


def read(folder: str | Path, lock: bool = False) -> RunFolder:
    """Read the run in a folder. lock: lock the folder first, to resume it.

    Raises UsageError if the folder does not hold a run, Error if the checkpoint is damaged or from an unknown version.
    """
    folder = Path(folder)
    if not exists(folder):
        raise UsageError(None, folder, _no_run(folder))
    run = RunFolder(folder, recorded=Config())
    if lock:
        run.lock()
    path = folder / CHECKPOINT
    try:
        run.arrays, content = checkpoint.load(path)
        if content.get("format") != FORMAT:
            raise Error(f"{path} was written by another version of gluon_mgpu: use that version")
        run.position, written = Position.from_json(content), dict(content["config"])
        run._settings = {name: value for name, value in written.items() if name in RECORDED}
        run.details = {name: value for name, value in written.items() if name in DETAILS}
        run.recorded = Config(**Config.parse({**run._settings, **_devices(run.details)}))
        shape = tuple(run.details.get("image_shape", IMAGE_SHAPE))
        if len(shape) != 3 or any(type(size) is not int or not 1 <= size <= LARGEST_IMAGE for size in shape):
            raise ValueError(f"image_shape {shape}")
        run.details["image_shape"] = shape
        if unknown := [f"{name} ({written[name]})" for name in sorted(written.keys() - RECORDED - DETAILS)]:
            log.say(f"{path}: this version ignores {', '.join(unknown)}, because it has no such settings")
    except BaseException as error:
        run.unlock()
        if isinstance(error, (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, UsageError)):
            advice = f"invalid run configuration ({error}); start the run again in another folder"
            raise Error(f"{path}: {advice}") from None
        raise
    return run


def exists(folder: str | Path) -> bool:
    """Whether the folder holds a run, that is, a checkpoint, even a damaged one."""
    return os.path.lexists(Path(folder) / CHECKPOINT)


def _no_run(folder: Path) -> str:
    """Explain why a path is not the folder of a run, and what to do."""
    if os.path.isfile(folder):
        return f"a file; pass the run's folder, such as {folder.parent}"
    runs = sorted(path.parent for path in folder.glob(f"*/{CHECKPOINT}")) if os.path.isdir(folder) else []
    if runs:
        return f"not a run; did you mean {runs[0]}?"
    return "not a run: it has no checkpoint; pass the folder of a run, such as runs/first"


def _devices(details: dict[str, Any]) -> dict[str, Any]:
    """The settings for the recorded devices, such as ["cpu(0)", "cpu(1)"]. Raises ValueError if they are invalid."""
    parsed = re.findall(r"(cpu|gpu)\((\d+)\)", " ".join(details["devices"]))
    if not parsed or len(parsed) != len(details["devices"]):
        raise ValueError(f"devices {details['devices']}")
    return {"device": parsed[0][0], "gpus": [int(index) for _, index in parsed]}
