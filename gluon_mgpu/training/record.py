"""A run as a record: its settings, other facts, its progress and its arrays. A checkpoint holds one record.

`read` returns the record in a run's folder. A run is resumed from it alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.checkpoint import Arrays
from gluon_mgpu.training.config import RECORDED, Config

FORMAT = 1
CHECKPOINT = "checkpoint.npz"
# What a run records besides its settings
CHANGEABLE = ("workers", "devices", "threads", "version", "mxnet", "numpy", "python")
DATA = ("data", "data_digest", "data_checksum", "image_shape", "image_dtype", "classes", "running_stats")
DETAILS = {*CHANGEABLE, *DATA}
NEEDED = {"devices", "image_shape", "image_dtype", "classes"}  # the first versions did not record all of these
LARGEST_IMAGE = 65536  # limit on each size in image_shape


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


class Run(NamedTuple):
    """What a checkpoint holds. details: what is recorded besides the settings, such as the image shape. arrays: those
    of `Model.arrays` and the lesson's state; {} while the model has them."""

    config: Config
    details: dict[str, Any]
    position: Position
    arrays: Arrays

    def described(self) -> dict[str, Any]:
        """The content of config.json."""
        content: dict[str, Any] = json.loads(json.dumps({**self.config.recorded(), **self.details}))
        return content

    def as_json(self) -> dict[str, Any]:
        """All but the arrays."""
        return {"format": FORMAT, "config": self.described(), **self.position.as_json()}

    @classmethod
    def from_json(cls, content: dict[str, Any], arrays: Arrays) -> Run:
        """Create a run from the result of `as_json`. Raises UsageError, ValueError or another exception if it is not
        one."""
        recorded, position = dict(content["config"]), Position.from_json(content)
        details = {name: value for name, value in recorded.items() if name in DETAILS}
        settings = {name: value for name, value in recorded.items() if name in RECORDED}
        if str(settings.get("impl")).endswith(".py"):  # earlier versions recorded the path as it was given
            settings["impl"] = os.path.abspath(settings["impl"])
        shape, classes = tuple(details["image_shape"]), details["classes"]
        if len(shape) != 3 or any(type(size) is not int or not 1 <= size <= LARGEST_IMAGE for size in shape):
            raise ValueError(f"image_shape {shape}")
        if type(classes) is not int or classes < 1:
            raise ValueError(f"classes {classes}")
        if settings.get("seed") is None:
            raise ValueError("no seed")
        details["image_shape"] = shape
        return cls(Config(**Config.parse({**settings, **_devices(details)})), details, position, arrays)

    def check_data(self, data: Dataset, digest: str, data_dir: object) -> None:
        """Raise UsageError if this run was trained on other data. digest: of the data. data_dir: for the message."""
        if "data_checksum" in self.details:  # of a run of an earlier version
            is_same = self.details["data_checksum"] == data.checksum()
        else:
            is_same = self.details.get("data_digest") == digest
        if not is_same:
            raise UsageError("data_dir", data_dir, "not the data that the run was trained on")


def read(folder: str | Path) -> Run:
    """Read the run in a folder.

    Raises UsageError if the folder does not hold a run, Error if the checkpoint is damaged or from an unknown version.
    """
    if not exists(folder):
        raise UsageError(None, folder, _no_run(Path(folder)))
    path = Path(folder) / CHECKPOINT
    arrays, content = checkpoint.load(path)
    try:
        if content.get("format") != FORMAT or not NEEDED <= content["config"].keys():
            raise Error(f"{path} was written by another version of gluon_mgpu: use that version")
        run = Run.from_json(content, arrays)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, UsageError) as error:
        advice = f"invalid run configuration ({error}); start the run again in another folder"
        raise Error(f"{path}: {advice}") from None
    recorded = content["config"]
    if unknown := [f"{name} ({recorded[name]})" for name in sorted(recorded.keys() - RECORDED - DETAILS)]:
        log.say(f"{path}: this version ignores {', '.join(unknown)}, because it has no such settings")
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
