"""The settings of a run. Each is declared once; the command line, checks and resume rules are derived from that.

Momentum, weight decay, schedules, gradient accumulation, clipping and shares are off by default. With all of them off,
a step computes the same values as in the notebooks. docs/architecture.md says what to do after adding a field.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gluon_mgpu import TRAINABLE
from gluon_mgpu.data.datasets import DATASETS
from gluon_mgpu.distributed import process
from gluon_mgpu.runtime import devices
from gluon_mgpu.runtime.errors import UsageError, setting, shown
from gluon_mgpu.training.options import (
    FLAG,
    FREE,
    MOST,
    NOT_KEPT,
    Kind,
    Option,
    choice,
    instance,
    number,
    numbers,
    option,
    path,
    whole,
)

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")
T = TypeVar("T")

BUILT_IN = ("lenet", "lenet-max", "resnet18")
SCHEDULES = ("constant", "step", "cosine")
BASE_BATCH_SIZE = 256  # the batch size that scale_lr refers to

LEAST_LR, MOST_LR = 1e-37, 1e38  # just inside the range of float32
COUNT = whole(1)
PART = number(float, "at least 0 and less than 1, such as 0.9", lambda x: 0 <= x < 1)


def _flag_or_plan(value: Any) -> Any:
    """Check the setting `tune`: a flag, or the block and the piece that an older run has recorded."""
    if isinstance(value, bool):
        return value
    block, piece = value
    if {type(block), type(piece)} != {int} or block not in (1, 16) or not 0 <= piece <= 65536:
        raise ValueError
    return block, piece


# {heading in --help: a function that declares a setting under it}
network = partial(option, "Network and data")
training = partial(option, "Training")
devices_ = partial(option, "Devices", on_resume=FREE)
processes = partial(option, "Several processes", on_resume=NOT_KEPT)
files = partial(option, "Files", on_resume=NOT_KEPT)


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Raises UsageError if one is invalid; the message names the setting and its value."""

    impl: Any = network(  # str; `implementations.train` also takes a lesson
        "scratch",
        instance("a lesson's name or file", str, words=TRAINABLE),
        "scratch uses NDArray alone; highlevel uses Gluon; sharded is scratch with --zero. FILE.py is your own lesson: "
        "a changed copy of scratch.py or highlevel.py.",
        on_resume=FREE,
        metavar=f"{'|'.join(TRAINABLE)}|FILE.py",
    )
    num_gpus: int | str | Sequence[int] = devices_(
        1,
        instance("a number or a list of indices", str, int, list, tuple),
        "Number of devices, such as 2, or their indices, such as 0,2.",
        flag="--gpus",
        metavar="N|I,J,...",
    )
    batch_size: int = training(256, COUNT, "Examples per step, across all devices.")
    lr: float = training(
        0.2,
        number(float, f"from {LEAST_LR} to {MOST_LR}, such as 0.2", lambda x: LEAST_LR <= x <= MOST_LR),
        "Learning rate.",
    )
    epochs: int = training(4, COUNT, "Number of passes through the training set.", on_resume=FREE)
    seed: int | None = training(
        None,
        whole(0),
        "Seed for the initial parameters, shuffling and synthetic data. On CPU, runs with the same seed are "
        "bit-for-bit identical. Default: a random seed.",
    )
    model: str = network(
        "lenet",
        instance("a network's name", str, words=BUILT_IN),
        "scratch supports only lenet. lenet-max uses max pooling.",
        metavar="|".join(BUILT_IN),
    )
    dataset: Any = network(  # str; `implementations.train` also takes a Dataset
        "fashion-mnist",
        choice(*DATASETS),
        "synthetic needs no files; own is your own data in --data-dir.",
    )
    limit: int | None = network(
        None,
        COUNT,
        "Use only the first N training examples and the first N/6 test examples (at least 100).",
    )
    data_dir: str | Path | None = network(
        None,
        path("folder", "data"),
        "Folder that contains the data set; for own, a .npz or IDX files. Default: GLUON_MGPU_DATA if it is set, else "
        "the folders listed in docs/training.md, else a download.",
        on_resume=NOT_KEPT,
    )
    hybridize: bool = network(
        True,
        FLAG,
        "With Gluon, --hybridize runs the network as one graph, and --no-hybridize operator by operator.",
        on_resume=FREE,
    )
    tune: bool | tuple[int, int] = network(
        True,
        Kind("True or False", _flag_or_plan),
        "With Gluon on CPU, --tune uses faster operators that compute the same values up to rounding, and --no-tune "
        "runs the network as written.",
        on_resume=FREE,
    )
    scale_lr: bool = training(False, FLAG, "Multiply --lr by batch size / 256.")
    schedule: str = training(
        "constant",
        choice(*SCHEDULES),
        "constant; step: multiply the learning rate by --step-factor after each epoch in --step-epochs; cosine: "
        "decrease it to 0.",
    )
    milestones: tuple[int, ...] = training(
        (),
        numbers(number(int, "a whole number", bool), "increasing epoch numbers, such as 2,3"),
        "Epochs after which --schedule step changes the learning rate.",
        flag="--step-epochs",
        metavar="E,F,...",
    )
    gamma: float = training(
        0.1,
        number(float, "above 0 and less than 1", lambda x: 0 < x < 1),
        "Factor for --schedule step.",
        flag="--step-factor",
    )
    warmup_epochs: float = training(
        0.0,
        number(float, "a number of at least 0", lambda x: 0 <= x <= MOST),
        "Increase the learning rate from 0 during the first X epochs. X must be less than --epochs.",
    )
    momentum: float = training(0.0, PART, "SGD momentum, such as 0.9.")
    weight_decay: float = training(0.0, PART, "Weight decay for all parameters, such as 0.0005.")
    max_grad_norm: float | None = training(
        None,
        number(float, "from 1e-30 to 1e30, such as 1", lambda x: 1e-30 <= x <= 1e30),
        "Limit the norm of the batch's mean gradient to X.",
        flag="--clip-norm",
    )
    grad_accum_steps: int = training(
        1, COUNT, "Compute the gradient of each batch in N parts, to save memory.", flag="--accumulate"
    )
    device: str = devices_("auto", choice(*devices.DEVICES), "auto uses GPUs if there are any, else CPU contexts.")
    shares: tuple[float, ...] | None = devices_(
        None,
        numbers(number(float, "above 0", lambda x: 0 < x <= 1e9), "one number above 0 per device, such as 80,20"),
        "Split each batch between unequal devices in this ratio, such as 80,20.",
        metavar="A,B,...",
    )
    zero: int = devices_(
        0,
        whole(0, 3),
        "With --impl sharded: 1 shards the optimizer state across the devices, 2 also the gradients, 3 also the "
        "parameters.",
    )
    kvstore: str = processes(
        "local",
        choice(*process.KVSTORES),
        "Sum gradients in this process (local), with Horovod (start it with horovodrun), or with MXNet's parameter "
        "servers (start them with the launch command). See docs/distributed.md.",
    )
    compress: str | None = processes(
        None,
        instance("fp16 or 2bit:T", str, words=("fp16", "2bit:0.5")),
        "Send gradients as 16-bit numbers (requires --kvstore horovod), or as 2-bit numbers with threshold T "
        "(requires --kvstore dist_sync).",
        metavar="fp16|2bit:T",
    )
    out: str | Path | None = files(
        None,
        path("folder", "runs/first"),
        "Write config.json, metrics.jsonl, curves.png and checkpoint.npz to this folder.",
    )
    resume: str | Path | None = files(
        None,
        path("folder", "runs/first"),
        "Continue the run in this folder with its saved settings. You can change --epochs (except with a cosine "
        "schedule), --shares, and the options for devices and implementations; --data-dir, --kvstore and --compress "
        "are not saved.",
    )
    profile: str | Path | None = files(
        None,
        path("file", "profile.json"),
        "Record what each device does during a few steps, for chrome://tracing or Perfetto. Also draw the recording "
        "as a PNG image next to FILE.",
    )

    def __post_init__(self) -> None:
        for name, declared in OPTIONS.items():
            value = getattr(self, name)
            if value is None and DEFAULTS[name] is None:
                continue
            try:
                object.__setattr__(self, name, declared.kind.check(value))
            except ValueError as error:
                raise UsageError(name, value, str(error)) from None
        self._check_combinations()

    def _check_combinations(self) -> None:
        """Raise UsageError if two settings contradict each other."""
        if not LEAST_LR <= self.peak_lr <= MOST_LR:
            raise UsageError("lr", self.lr, "out of range after scaling to the batch size")
        if self.grad_accum_steps > self.batch_size:
            advice = f"must be from 1 to {self.batch_size}, the batch size"
            raise UsageError("grad_accum_steps", self.grad_accum_steps, advice)
        if self.warmup_epochs >= self.epochs:
            advice = f"must be at least 0 and less than {self.epochs}, the number of epochs"
            raise UsageError("warmup_epochs", self.warmup_epochs, advice)
        if self.schedule == "step" and not self.milestones:
            example = setting("milestones", (2, 3))
            raise UsageError("schedule", "step", f"needs the epochs at which the rate changes, such as {example}")
        if self.milestones and self.schedule != "step":
            raise UsageError("milestones", self.milestones, f"needs {setting('schedule', 'step')}")
        increasing = list(self.milestones) == sorted(set(self.milestones))
        if not (increasing and all(1 <= epoch < self.epochs for epoch in self.milestones)):
            advice = f"must be increasing epoch numbers, at least 1 and below {self.epochs}"
            raise UsageError("milestones", self.milestones, advice)
        if self.out and self.resume and str(self.out) != str(self.resume):
            raise UsageError("out", self.out, f"a resumed run stays in its folder, {self.resume}; omit this setting")

    @property
    def peak_lr(self) -> float:
        """The learning rate after scaling, before the schedule changes it."""
        return self.lr * self.batch_size / BASE_BATCH_SIZE if self.scale_lr else self.lr

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Compute the learning rate of an update. step: the number of earlier updates."""
        warmup = round(self.warmup_epochs * steps_per_epoch)
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        if self.schedule == "step":
            return self.peak_lr * self.gamma ** sum(step >= epoch * steps_per_epoch for epoch in self.milestones)
        if self.schedule == "cosine":
            progress = (step - warmup) / (self.epochs * steps_per_epoch - warmup)
            return self.peak_lr * (1 + math.cos(math.pi * progress)) / 2
        return self.peak_lr

    def recorded(self) -> dict[str, Any]:
        """The settings that a run records in config.json and in its checkpoints. Devices are recorded separately."""
        return {name: getattr(self, name) for name in RECORDED}


OPTIONS: dict[str, Option] = {field.name: field.metadata["option"] for field in dataclasses.fields(Settings)}
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}
RECORDED = [name for name, o in OPTIONS.items() if o.on_resume != NOT_KEPT and name not in ("num_gpus", "device")]
PLAIN = Settings()  # plain SGD, as in the notebooks


def flag(name: str) -> str:
    """The option of a setting on the command line: "lr" -> "--lr"."""
    return OPTIONS[name].flag or f"--{name.replace('_', '-')}"


def takes(settings: Callable[P, Settings]) -> Callable[[Callable[[dict[str, Any]], T]], Callable[P, T]]:
    """Let callers of a function pass settings as arguments, like those of `Settings`.

    The function gets a dict of the settings that the caller passed, without those that the caller omitted. Raises
    UsageError for an unknown name.
    """

    def decorate(function: Callable[[dict[str, Any]], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            if len(args) > len(OPTIONS):
                raise TypeError(f"takes at most {len(OPTIONS)} arguments, but {len(args)} were given")
            given = dict(zip(OPTIONS, args))
            for name, value in options.items():
                if name not in OPTIONS:
                    near = difflib.get_close_matches(name, OPTIONS)
                    raise UsageError(name, value, f"no such setting{f'; did you mean {near[0]}?' if near else ''}")
                if name in given:
                    raise UsageError(name, value, f"given twice; the other value is {shown(given[name])}")
                given[name] = value
            return function(given)

        returns = inspect.signature(function).return_annotation
        call.__signature__ = inspect.signature(settings).replace(return_annotation=returns)  # type: ignore[attr-defined]
        return call

    return decorate
