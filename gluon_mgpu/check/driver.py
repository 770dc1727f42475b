"""What a framework's driver does for the judge: it takes steps, and says what they did on each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Claim = tuple[str, str]  # a claim, and what is wrong; "": nothing
Shards = Sequence[Sequence[int]]  # the indices of the examples of each device
UNITS = {"device": "devices", "process": "processes"}


@dataclass
class Step:
    """What one step did on each device. changes: of the parameters. grads: what each optimizer got at its steps, if
    known. losses: what the step returned. examples: those it used, if asked. rest: other state that has changed, as it
    is after the step. rates: the optimizers' settings. raw: the gradients of the backward pass, on one device. calls,
    modules: what batch normalization and each module got, for the driver."""

    changes: list[Arrays]
    grads: list[Arrays] = field(default_factory=list)
    losses: list[np.ndarray] = field(default_factory=list)
    examples: Shards = ()
    rest: list[Arrays] = field(default_factory=list)
    rates: list[dict[str, float]] = field(default_factory=list)
    raw: list[Arrays] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    modules: list[Any] = field(default_factory=list)


@dataclass
class Session:
    """Steps that were taken one after the other. start: the parameters of each device before the first step. kept:
    other state then; empty: the steps list only what has changed. failure: why the steps ended early; late: because of
    the time limit. facts: see `Driver.run`."""

    start: list[Arrays] = field(default_factory=list)
    kept: list[Arrays] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    failure: str = ""
    late: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, before: list[Arrays], after: list[Arrays], losses: Sequence[np.ndarray] = ()) -> None:
        """Add a step. before, after: the parameters of each device."""
        changes = [{n: a - old[n] for n, a in new.items()} for old, new in zip(before, after)]
        self.steps.append(Step(changes, losses=[*losses]))


class Driver:
    """Takes steps with one framework. unit: "device" or "process". divides: what divides a batch. infers: whether
    `split` only infers the examples from gradients. still: the claim and the reason if no step changes anything.
    uneven: whether a batch can be uneven. notes: for the user, after `checks`. advice: what to do in this framework,
    for {what is wrong}."""

    unit = "device"
    divides = "the step"
    infers = False
    still = "update", "the steps on one device do not change the parameters; assign in place"
    image_shape: Sequence[int] = (1, 28, 28)
    classes = 10
    uneven = True
    advice: Mapping[str, str] = {
        "not summed": "sum them before the update",
        "replicas": "sum all gradients before the update",
        "statistics": "average them, or send those of the first to the others",
        "left": "set them to 0 after each update",
    }

    @cached_property
    def notes(self) -> list[str]:
        return []

    def batch(self, i: int, n: int) -> Any:
        """Batch i, of n examples. Here, random images and labels."""
        rng = np.random.default_rng(i)
        return rng.random((n, *self.image_shape), np.float32), rng.integers(0, self.classes, n).astype(np.int32)

    def take(self, batch: Any, examples: Sequence[int]) -> Any:
        """Some examples of a batch."""
        return tuple(array[[*examples]] for array in batch)

    def split(self, k: int, batch: Any, n: int) -> Shards | None:
        """The examples on each of k devices; None if unknown."""
        return None

    def run(self, k: int, batches: Sequence[Any], **options: Any) -> Session:
        """Take a step with each batch on k devices, with a fresh copy of the user's code.

        double: in float64. shards: for each batch, what batch normalization sees at a time. seed: of the random numbers
        that a step draws. clear: set gradients that a step leaves to 0. clips: False: no gradient is clipped. Facts:
        "normalized": whether the network has batch normalization; "statistics": the names of its running statistics;
        "synced": those that a step makes equal, or True for all; "params": what is trained, if known; "low": the lowest
        precision that is used; "how": for the user; "left": whether a step leaves gradients; "reason": why the step
        cannot be compared.
        """
        raise NotImplementedError

    def clips(self) -> bool:
        """Whether a step has clipped gradients."""
        return False

    def missed(self) -> list[str]:
        """Lines, conditions and limits that no step has reached."""
        return []

    def stress(self) -> dict[str, dict[str, Any]]:
        """What may reach them: options of `run`."""
        return {}

    def begins(self, k: int, batches: Sequence[Any], **options: Any) -> str:
        """Where the last of some steps on k devices begins to differ from that on one, as the end of a sentence."""
        return ""

    def checks(self, k: int, is_wrong: bool) -> Iterator[Claim]:
        """What else can be said after the steps on k devices, most important first. is_wrong: if they differ."""
        yield from ()
