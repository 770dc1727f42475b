"""The settings of a run. The command line, the checks and --help follow from each field's declaration.

With the defaults, a step is the notebooks' step; highlevel's network is hybridized. This module imports no mxnet, so
--help appears at once.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from gluon_mgpu.compat import devices
from gluon_mgpu.data.datasets import DATASETS
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import UsageError, setting, shown
from gluon_mgpu.support.params import FILE, FOLDER, FloatRange, Location

SCHEDULES = ("constant", "cosine")
LESSONS = ("scratch", "highlevel")


class Numbers(click.ParamType):
    """Numbers separated by commas or, from Python, in a sequence."""

    name = "numbers"

    def __init__(self, of: click.ParamType) -> None:
        self.of = of

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        return tuple(_convert(self.of, part) for part in (value.split(",") if isinstance(value, str) else value))


class Indices(click.ParamType):
    """The indices of devices: a count, or a list of indices. See `devices.parse`."""

    name = "devices"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        try:
            return tuple(devices.parse(value))
        except UsageError as error:
            self.fail(f"{value!r} {error.advice}.", param, ctx)


COUNT = click.IntRange(1)
FRACTION = FloatRange(0, 1, max_open=True)


class Setting(NamedTuple):
    """How a setting is declared. type: checks and converts values, on the command line and from Python.

    heading: of its group in --help. lessons: those, and their copies, that have the setting. changeable: whether a
    resumed run may change it. recorded: whether the run's folder keeps it. typed: the default, as a user would type it.
    """

    type: click.ParamType
    help: str
    heading: str = "Training"
    metavar: str | None = None
    lessons: Sequence[str] = LESSONS
    changeable: bool = False
    recorded: bool = True
    typed: str | None = None


def declare(default: Any, *args: Any, **options: Any) -> Any:
    """Declare a setting. default: None means that the setting is off, or chosen by the program. Other arguments: those
    of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(*args, **options)})


@dataclass(frozen=True)
class Config:
    """The settings of a run. Raises UsageError if one is invalid."""

    impl: Any = declare(  # str; `train` also takes a lesson
        "scratch",
        click.STRING,
        "scratch uses NDArray alone; highlevel uses Gluon. FILE.py is your own lesson: a changed copy of scratch.py or "
        "highlevel.py.",
        "Network and data",
        f"{'|'.join(LESSONS)}|FILE.py",
        changeable=True,
    )
    gpus: tuple[int, ...] = declare(
        (0,),
        Indices(),
        "Number of devices, such as 2, or their indices, such as 0,2.",
        "Devices",
        "N|I,J,...",
        changeable=True,
        recorded=False,
        typed="1",
    )
    batch_size: int = declare(256, COUNT, "Examples per step, across all devices.")
    lr: float = declare(0.2, FloatRange(0, min_open=True), "Learning rate.")
    epochs: int = declare(4, COUNT, "Number of passes through the training set.", changeable=True)
    seed: int | None = declare(
        None,
        click.IntRange(0, 2**31 - 1),
        "Seed for the initial parameters, shuffling and synthetic data. With the same seed, kind of CPU and "
        "number of threads, runs on CPU are bit-for-bit identical. Default: a random seed.",
    )
    dataset: Any = declare(  # str; `train` also takes a Dataset
        "fashion-mnist",
        click.Choice(DATASETS),
        "synthetic needs no files; own is your own data in --data-dir.",
        "Network and data",
    )
    limit: int | None = declare(
        None,
        COUNT,
        "Use only the first N training examples and the first N/6 test examples (at least 100).",
        "Network and data",
    )
    data_dir: str | Path | None = declare(
        None,
        FILE,
        "Folder that contains the data set; for own, a .npz file, or a folder with one. Default: GLUON_MGPU_DATA if it "
        "is set, else the folders listed in docs/training.md, else a download.",
        "Network and data",
        "DIR",
        recorded=False,
    )
    model: str = declare(
        "lenet",
        click.STRING,
        "With highlevel: the network. lenet-max uses max pooling.",
        "Network and data",
        "lenet|lenet-max|resnet18",
        lessons=("highlevel",),
    )
    hybridize: bool = declare(
        True,
        click.BOOL,
        "With highlevel: --hybridize runs the network as one graph, --no-hybridize operator by operator.",
        "Network and data",
        lessons=("highlevel",),
        changeable=True,
    )
    tune: bool = declare(
        False,
        click.BOOL,
        "With highlevel and MXNet 1.9.1, on CPU: pad the channels of convolutions with zeros to a multiple of 8 or 16, "
        "which is faster. Results are the same except for rounding.",
        "Network and data",
        lessons=("highlevel",),
        changeable=True,
    )
    schedule: str = declare(
        "constant",
        click.Choice(SCHEDULES),
        "Learning rate after the warm-up: constant, or decreased to 0 along a cosine.",
    )
    warmup_epochs: float = declare(
        0.0,
        FloatRange(0),
        "Increase the learning rate from 0 during the first X epochs. X must be less than --epochs.",
    )
    momentum: float = declare(0.0, FRACTION, "With highlevel: SGD momentum, such as 0.9.", lessons=("highlevel",))
    weight_decay: float = declare(
        0.0, FRACTION, "With highlevel: weight decay for all parameters, such as 0.0005.", lessons=("highlevel",)
    )
    device: str = declare(
        "auto",
        click.Choice(devices.DEVICES),
        "auto uses GPUs if there are any, else CPU contexts.",
        "Devices",
        changeable=True,
        recorded=False,
    )
    shares: tuple[float, ...] | None = declare(
        None,
        Numbers(FloatRange(0, 1e9, min_open=True)),
        "Split each batch between unequal devices in this ratio, such as 80,20.",
        "Devices",
        "A,B,...",
        changeable=True,
    )
    kvstore: str = declare(
        "local",
        click.Choice(("local", "mpi")),
        "Sum gradients in this process (local), or over several processes that mpiexec has started (mpi). See "
        "docs/several-machines.md.",
        "Several processes",
        recorded=False,
    )
    out: str | Path | None = declare(
        None,
        FOLDER,
        "Write config.json, metrics.jsonl, curves.png and checkpoint.npz to this folder.",
        "Files",
        "DIR",
        recorded=False,
    )
    resume: str | Path | None = declare(
        None,
        FOLDER,
        "Continue the run in this folder with its saved settings. You can change --epochs (except with a cosine "
        "schedule), --shares, and the options for devices and implementations; --data-dir and --kvstore are not saved.",
        "Files",
        "DIR",
        recorded=False,
    )

    @classmethod
    def parse(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Convert each option to its type. Raises UsageError for an unknown name or an invalid value."""
        parsed = {}
        for name, value in options.items():
            if name not in SETTINGS:
                raise UsageError(name, value, "no such setting")
            default = getattr(cls, name)
            if value is not None or default is not None:
                try:
                    value = _convert(SETTINGS[name].type, value)
                except click.BadParameter as error:
                    advice = error.message.rstrip(".") if "\n" not in error.message else "has the wrong type"
                    raise UsageError(name, value, advice) from None
                except (AttributeError, OverflowError, TypeError, ValueError):
                    raise UsageError(name, value, "has the wrong type") from None
            parsed[name] = None if value == () and default is None else value
        return parsed

    @staticmethod
    def with_absolute_paths(options: dict[str, Any]) -> dict[str, Any]:
        """The same options, whatever the working folder will be. This includes GLUON_MGPU_DATA.

        options: as `parse` returns them.
        """
        if folder := os.environ.get("GLUON_MGPU_DATA"):
            os.environ["GLUON_MGPU_DATA"] = os.path.abspath(os.path.expanduser(folder))
        paths = {name for name, value in options.items() if value and isinstance(SETTINGS[name].type, Location)}
        return {name: os.path.abspath(value) if name in paths else value for name, value in options.items()}

    def __post_init__(self) -> None:
        """Raise UsageError if two settings contradict each other."""
        if self.warmup_epochs >= self.epochs:
            advice = f"must be at least 0 and less than {self.epochs}, the number of epochs"
            raise UsageError("warmup_epochs", self.warmup_epochs, advice)
        if self.out and self.resume and os.path.realpath(self.out) != os.path.realpath(self.resume):
            raise UsageError("out", self.out, f"a resumed run stays in its folder, {self.resume}; omit this setting")

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Compute the learning rate of an update. step: the number of earlier updates."""
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        if self.schedule == "cosine":
            progress = (step - warmup) / (self.epochs * steps_per_epoch - warmup)
            return self.lr * (1 + math.cos(math.pi * progress)) / 2
        return self.lr

    def check_batch_size(self, examples: int, device_count: int) -> None:
        """Raise UsageError if a step, also the last one of an epoch, has fewer examples than devices. device_count:
        number of devices of all workers."""

        def last(batch_size: int) -> int:
            return examples % batch_size or min(batch_size, examples)

        rest = last(self.batch_size)
        if min(self.batch_size, rest) >= device_count:
            return
        works = [size for size in range(device_count, max(examples, device_count) + 1) if last(size) >= device_count]
        near = sorted(sorted(works, key=lambda size: abs(size - self.batch_size))[:2])
        which = "a step" if self.batch_size < device_count else "the last step of an epoch"
        count = min(self.batch_size, rest)
        has = f"{which} would have {count} {log.plural(count, 'example')}"
        advice = f"needs one for each of {device_count} devices; use {' or '.join(map(str, near)) or 'more data'}"
        raise UsageError("batch_size", self.batch_size, f"{has}, but {advice}")

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of the named settings that differ from their defaults."""
        return [name for name in names if getattr(self, name) != getattr(Config, name)]

    def with_defaults(self, names: Iterable[str]) -> Config:
        """These settings, but with the defaults of the named ones."""
        return dataclasses.replace(self, **{name: getattr(Config, name) for name in names})

    def recorded(self) -> dict[str, Any]:
        """The settings that a run records. Its devices are recorded as contexts, not as settings."""
        return {name: value for name, value in vars(self).items() if name in RECORDED}

    def resumed(self, given: dict[str, Any]) -> Config:
        """The settings of a resumed run. self: the recorded settings. given: those that the user passed, parsed.

        Raises UsageError if a given setting differs from the recorded one, and is not one that may change.
        """
        for name, value in given.items():
            recorded = getattr(self, name)
            if name == "epochs" and self.schedule == "cosine" and value != recorded:
                advice = f"the run's cosine schedule ends at epoch {recorded}; omit this setting"
                raise UsageError(name, value, advice)
            keep = name in RECORDED and not SETTINGS[name].changeable and (name, value) != ("seed", None)
            if keep and value != recorded:
                raise UsageError(name, value, f"the run used {shown(recorded)}; omit this setting")
        given = {**given, "seed": self.seed}
        if len(given.get("gpus", self.gpus)) != len(self.gpus):
            given.setdefault("shares", None)
        try:
            return dataclasses.replace(self, **given)
        except UsageError as error:
            if error.name in given or "epochs" not in given:
                raise
            advice = f"does not fit the run's {setting(str(error.name))} {shown(error.value)}"
            raise UsageError("epochs", given["epochs"], advice) from None


def _convert(kind: click.ParamType, value: Any) -> Any:
    """Convert a text, as click does, or a value from Python, where click would make 1 of True and 64 of 64.5."""
    value = bool(value) if isinstance(value, np.bool_) else value
    is_integer, is_number = isinstance(kind, click.IntRange), isinstance(kind, (click.IntRange, click.FloatRange))
    is_fraction = isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)
    if (is_number and isinstance(value, bool)) or (is_integer and is_fraction):
        raise click.BadParameter(f"{value!r} is not a valid {'integer' if is_integer else 'number'}")
    return kind.convert(value, None, None)


SETTINGS: dict[str, Setting] = {field.name: field.metadata["setting"] for field in dataclasses.fields(Config)}
RECORDED = {name for name in SETTINGS if SETTINGS[name].recorded}
