"""The settings that determine the result of a run, checked in one place for the command line, Python and resumed runs.

Momentum, weight decay, schedules, gradient accumulation, clipping and shares are off by default. With all of them off,
a step computes the same values as in the notebooks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from gluon_mgpu.runtime import log
from gluon_mgpu.runtime.devices import joined
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import datasets

BUILT_IN = ("lenet", "lenet-max", "resnet18")
MODELS = [*BUILT_IN]  # networks.register adds names to this list
MOST = 2**31 - 1  # largest value of an integer setting
SCHEDULES = ("constant", "step", "cosine")
BASE_BATCH_SIZE = 256  # the batch size that scale_lr refers to
# Types of the settings that can be None. Every other setting must have the type of its default value.
OPTIONAL: dict[str, Any] = {"limit": int, "seed": int, "max_grad_norm": float, "shares": (tuple, str)}
RENAMED = {  # names in version 0.1.0, which callers and old checkpoints may still use
    "accumulate": "grad_accum_steps",
    "clip_norm": "max_grad_norm",
    "step_epochs": "milestones",
    "step_factor": "gamma",
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Raises UsageError if one is invalid; the message names the setting and its value."""

    batch_size: int = 256  # examples per update, across all devices
    lr: float = 0.2  # learning rate
    model: str = "lenet"
    dataset: str = "fashion-mnist"
    epochs: int = 4
    limit: int | None = None  # train on the first `limit` examples; None: all
    seed: int | None = None  # for the parameters, shuffling and synthetic data; None: a random seed
    momentum: float = 0.0
    weight_decay: float = 0.0  # applied to every parameter, as in Gluon and PyTorch
    max_grad_norm: float | None = None  # limit on the norm of the batch's mean gradient, over all parameters
    grad_accum_steps: int = 1  # number of parts that a batch is split into; their gradients are added
    schedule: str = "constant"
    milestones: tuple[int, ...] = ()  # schedule "step": the epochs after which lr is multiplied by gamma
    gamma: float = 0.1
    warmup_epochs: float = 0.0  # lr grows linearly from 0 during this number of epochs
    scale_lr: bool = False  # lr is for batches of 256 examples; train with lr * batch_size / 256
    shares: tuple[float, ...] | str | None = None  # one number per device; "auto": measured; None: equal

    def __post_init__(self) -> None:
        for name in ("milestones", "shares"):  # JSON has no tuples, and callers may pass lists
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for field in fields(self):
            self._check_type(field.name, OPTIONAL.get(field.name, type(field.default)))
        self._check_values()

    @classmethod
    def create(cls, batch_size: int, lr: float, **options: Any) -> Settings:
        """Create settings from the arguments of `train`. Names from version 0.1.0 also work, but print a notice."""
        for old in options.keys() & RENAMED.keys():
            log.say(f"{old} is now called {RENAMED[old]}")
            options[RENAMED[old]] = options.pop(old)
        unknown = sorted(options.keys() - set(NAMES))
        if unknown:
            raise UsageError(f"{unknown[0]}={options[unknown[0]]!r}: unknown option")
        return cls(batch_size, lr, **options)

    def _check_type(self, name: str, wanted: Any) -> None:
        value = getattr(self, name)
        if (value is None and name in OPTIONAL) or (wanted is float and type(value) is int):
            return
        if isinstance(value, bool) is not (wanted is bool) or not isinstance(value, wanted):
            raise UsageError(f"{name}={value!r}: must have type {getattr(wanted, '__name__', 'tuple or str')}")

    def _check_values(self) -> None:
        self._require("batch_size", 1 <= self.batch_size <= MOST, f"must be from 1 to {MOST}")
        # The limits are just inside the range of float32. nan is rejected, because every comparison with nan is false.
        self._require("lr", 1e-37 < self.lr < 1e38, "must be from 1e-37 to 1e38, such as 0.2")
        self._require("lr", 1e-37 < self.peak_lr < 1e38, "out of range after scaling to the batch size")
        self._require("model", self.model in MODELS, f"must be one of {', '.join(MODELS)}")
        self._require("dataset", self.dataset in datasets.NAMES, f"must be one of {', '.join(datasets.NAMES)}")
        self._require("epochs", 1 <= self.epochs <= MOST, f"must be from 1 to {MOST}")
        examples = datasets.LARGEST
        self._require("limit", self.limit is None or 1 <= self.limit <= examples, f"must be from 1 to {examples}")
        self._require("seed", self.seed is None or 0 <= self.seed <= MOST, f"must be from 0 to {MOST}")
        self._require("momentum", 0 <= self.momentum < 1, "must be at least 0 and less than 1, such as 0.9")
        self._require("weight_decay", 0 <= self.weight_decay < 1, "must be at least 0 and less than 1, such as 0.0005")
        norm = self.max_grad_norm
        self._require("max_grad_norm", norm is None or 1e-30 < norm < 1e30, "must be from 1e-30 to 1e30")
        most, steps = self.batch_size, self.grad_accum_steps
        self._require("grad_accum_steps", 1 <= steps <= most, f"must be from 1 to {most}, the batch size")
        self._require("schedule", self.schedule in SCHEDULES, f"must be one of {', '.join(SCHEDULES)}")
        self._check_milestones()
        self._require("gamma", 0 < self.gamma < 1, "must be above 0 and less than 1")
        warmup = 0 <= self.warmup_epochs < self.epochs
        self._require("warmup_epochs", warmup, f"must be at least 0 and less than {self.epochs}, the number of epochs")
        if isinstance(self.shares, tuple):
            numbers = self.shares and all(type(s) in (int, float) and 0 < s < 1e9 for s in self.shares)
            self._require("shares", bool(numbers), "must be one number above 0 per device, such as 80,20")
        else:
            valid = self.shares in (None, "auto")
            self._require("shares", valid, "must be one number per device, such as 80,20, or auto")

    def _check_milestones(self) -> None:
        if self.schedule == "step":
            self._require(
                "schedule", bool(self.milestones), "needs epochs at which the rate changes, such as milestones=2,3"
            )
        self._require("milestones", self.schedule == "step" or not self.milestones, "needs schedule=step")
        integers = all(type(epoch) is int for epoch in self.milestones)
        increasing = integers and list(self.milestones) == sorted(set(self.milestones))
        within = increasing and all(1 <= epoch < self.epochs for epoch in self.milestones)
        self._require("milestones", within, f"must be increasing epoch numbers, at least 1 and below {self.epochs}")

    def _require(self, name: str, condition: bool, advice: str) -> None:
        if not condition:
            value = getattr(self, name)
            raise UsageError(f"{name}={joined(value) if isinstance(value, tuple) else value}: {advice}")

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


NAMES = tuple(field.name for field in fields(Settings))
SGD = Settings()  # plain SGD, as in the notebooks


def add_model(name: str) -> None:
    """Accept `name` as a value of the setting `model`."""
    if name not in MODELS:
        MODELS.append(name)
