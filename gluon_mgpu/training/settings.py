"""What determines the result of a run, checked in one place: for the command line, for Python, and for a run resumed.

Beyond the notebooks' batch size and learning rate: momentum, weight decay, a schedule, gradient accumulation, clipping,
shares. By default all of these are off, and a step is the notebooks' own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Optional, Union

from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import datasets

MODELS = ["lenet", "lenet-max", "resnet18"]  # and what highlevel.add_model adds
SCHEDULES = ("constant", "step", "cosine")
BASE_BATCH_SIZE = 256  # that of scale_lr
Shares = Union[Sequence[float], str, None]  # a number a device; "auto" until they are measured


@dataclass(frozen=True)
class Settings:
    """Raises UsageError, in one line with the value, for a setting that cannot be."""

    batch_size: int = 256  # examples an update, over all devices together
    lr: float = 0.2  # learning rate
    model: str = "lenet"
    dataset: str = "fashion-mnist"
    epochs: int = 4
    limit: Optional[int] = None  # train on the first so many examples; None: all
    seed: Optional[int] = None  # of the parameters, of the order of every epoch, of the synthetic set; None draws one
    momentum: float = 0.0
    weight_decay: float = 0.0  # of every parameter, as Gluon and PyTorch do it
    clip_norm: Optional[float] = None  # largest norm of the whole gradient, which is the mean over the batch
    accumulate: int = 1  # in how many pieces, one after the other, the gradient of a batch is computed
    schedule: str = "constant"
    step_epochs: tuple[int, ...] = ()  # schedule "step": after which the learning rate is multiplied by step_factor
    step_factor: float = 0.1
    warmup_epochs: float = 0.0  # the learning rate first grows linearly from 0 for so long
    scale_lr: bool = False  # lr is for a batch of 256; use lr * batch_size / 256
    shares: Union[tuple[float, ...], str, None] = None  # of a batch, a device's: (80, 20), "auto", or None: even

    def __post_init__(self) -> None:
        for name in ("step_epochs", "shares"):  # JSON and callers have lists
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check()

    def _check(self) -> None:
        for field in fields(self):
            value, wanted = getattr(self, field.name), _KINDS[field.type]
            if isinstance(value, bool) is not (field.type is bool) or not isinstance(value, wanted):
                raise UsageError(f"{field.name} {value!r}: not of the right kind")
        _require(self.batch_size >= 1, "batch_size", self.batch_size, "give at least 1")
        # what float32 can hold; nan is neither
        _require(1e-37 < self.lr < 1e38, "lr", self.lr, "give a number above 0, such as 0.2")
        _require(1e-37 < self.peak_lr < 1e38, "lr", self.peak_lr, "too large or small once scaled to the batch")
        _require(self.model in MODELS, "model", self.model, f"choose one of {', '.join(MODELS)}")
        _require(self.dataset in datasets.NAMES, "dataset", self.dataset, f"choose one of {', '.join(datasets.NAMES)}")
        _require(self.epochs >= 1, "epochs", self.epochs, "give at least 1")
        _require(self.limit is None or self.limit >= 1, "limit", self.limit, "give at least 1")
        _require(self.seed is None or 0 <= self.seed < 2**31, "seed", self.seed, "give 0 to 2147483647")
        _require(0 <= self.momentum < 1, "momentum", self.momentum, "give 0 to below 1, such as 0.9")
        _require(0 <= self.weight_decay < 1, "weight_decay", self.weight_decay, "give 0 to below 1, such as 0.0005")
        _require(
            self.clip_norm is None or 1e-30 < self.clip_norm < 1e30,
            "clip_norm",
            self.clip_norm,
            "give a number above 0",
        )
        _require(1 <= self.accumulate <= self.batch_size, "accumulate", self.accumulate, f"give 1 to {self.batch_size}")
        _require(self.schedule in SCHEDULES, "schedule", self.schedule, f"choose one of {', '.join(SCHEDULES)}")
        _require(self.step_epochs or self.schedule != "step", "schedule", "step", "give step_epochs too, such as 2,3")
        _require(
            not self.step_epochs or self.schedule == "step",
            "step_epochs",
            joined(self.step_epochs),
            "give schedule step too, or leave them away",
        )
        grow = all(isinstance(e, int) for e in self.step_epochs) and list(self.step_epochs) == sorted(
            {*self.step_epochs}
        )
        _require(
            grow and all(1 <= e < self.epochs for e in self.step_epochs),
            "step_epochs",
            joined(self.step_epochs),
            f"give growing epochs, from 1 to less than all {self.epochs}",
        )
        _require(0 < self.step_factor < 1, "step_factor", self.step_factor, "give a number between 0 and 1")
        _require(
            0 <= self.warmup_epochs < self.epochs,
            "warmup_epochs",
            self.warmup_epochs,
            f"give 0 to below {self.epochs}, the number of epochs",
        )
        if isinstance(self.shares, tuple):
            right = self.shares and all(isinstance(s, (int, float)) and 0 < s < 1e9 for s in self.shares)
            _require(right, "shares", joined(self.shares), "give a number above 0 a device, such as 80,20")
        elif self.shares not in (None, "auto"):
            raise UsageError(f"shares {self.shares!r}: give a number a device, such as 80,20, or auto")

    @property
    def peak_lr(self) -> float:
        """The learning rate before the schedule changes it."""
        return self.lr * self.batch_size / BASE_BATCH_SIZE if self.scale_lr else self.lr

    def learning_rate(self, step: int, steps_an_epoch: int) -> float:
        """The learning rate of an update. step: how many updates came before it."""
        warmup = round(self.warmup_epochs * steps_an_epoch)
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        if self.schedule == "step":
            return self.peak_lr * self.step_factor ** sum(step >= e * steps_an_epoch for e in self.step_epochs)
        if self.schedule == "cosine":
            way = (step - warmup) / (self.epochs * steps_an_epoch - warmup)
            return self.peak_lr * (1 + math.cos(math.pi * way)) / 2
        return self.peak_lr


_KINDS: dict[object, Union[type, tuple[type, ...]]] = {
    int: int,
    float: (int, float),
    str: str,
    bool: bool,
    tuple[int, ...]: tuple,
    Optional[int]: (int, type(None)),
    Optional[float]: (int, float, type(None)),
    Union[tuple[float, ...], str, None]: (tuple, str, type(None)),
}


def _require(right: object, name: str, value: object, advice: str) -> None:
    if not right:
        raise UsageError(f"{name} {value}: {advice}")


def shard_sizes(examples: int, parts: int, shares: Shares = None) -> list[int]:
    """How many examples of a batch each of `parts` devices gets: ints that sum to `examples`.

    shares: a number a device, of which its size is in proportion; None: as even as can be, the first ones larger. Every
    device gets at least one example; where there are fewer examples than devices, the last devices get none.
    """
    if examples <= parts:
        return [int(i < examples) for i in range(parts)]
    if isinstance(shares, str):
        raise UsageError(f"shares {shares}: train alone measures them; give a number a device, such as 80,20")
    shares = shares or (1,) * parts
    exact = [examples * share / sum(shares) for share in shares]
    sizes = [max(1, int(e)) for e in exact]
    while sum(sizes) != examples:  # by the largest remainder
        grow = 1 if sum(sizes) < examples else -1
        chosen = max((i for i in range(parts) if sizes[i] + grow >= 1), key=lambda i: grow * (exact[i] - sizes[i]))
        sizes[chosen] += grow
    return sizes


def joined(numbers: Sequence[object]) -> str:
    """As --shares and --step-epochs take them: 80,20."""
    return ",".join(f"{number:g}" if isinstance(number, (int, float)) else repr(number) for number in numbers)


SGD = Settings()  # the notebooks' own step
