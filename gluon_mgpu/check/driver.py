"""What a framework's driver does for the judge: it takes steps, and says what they did on each device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Claim = tuple[str, str]  # a claim, and what is wrong; "": nothing
Shards = Sequence[Sequence[int]]  # the indices of the examples of each device
UNITS = {"device": "devices", "process": "processes"}


@dataclass(frozen=True)
class Options:
    """How steps are taken, if not as they are written."""

    double: bool = False  # in float64
    shards: Sequence[Shards] = ()  # for each batch: the examples that batch normalization sees at a time
    seed: int = 0  # of the random numbers that a step draws
    clear: bool = False  # set gradients that a step leaves to 0
    clips: bool = True  # False: no gradient is clipped
    constant: bool = False  # all random numbers are the same, if the driver knows where they are drawn
    factor: float = 1  # of the gradients; if it is not finite, only on the last device
    scale: float = 1  # of the inputs; if it is not finite, only of the last example


AS_WRITTEN = Options()


@dataclass
class StepResult:
    """What one step did. Lists of arrays have one entry per device."""

    changes: list[Arrays]  # of the parameters
    grads: list[Arrays] = field(default_factory=list)  # what each optimizer got at its steps, if known
    losses: list[np.ndarray] = field(default_factory=list)  # what the step returned
    examples: Shards = ()  # those it used, if the driver has asked
    rest: list[Arrays] = field(default_factory=list)  # other state that has changed, as it is after the step
    rates: list[dict[str, float]] = field(default_factory=list)  # the settings of the optimizers
    raw: list[Arrays] = field(default_factory=list)  # the gradients of the backward pass, on one device
    # for the driver
    modules: list[Any] = field(default_factory=list)  # what modules of a network computed
    statistics: list[Arrays] = field(default_factory=list)  # running statistics, before their average

    @property
    def moves(self) -> bool:
        """Whether the step changes something on the first device."""
        return any(a.any() for a in self.changes[0].values())


@dataclass
class Facts:
    """What a driver finds out about the code while it takes steps. Lists are names of arrays."""

    reason: str = ""  # why the steps cannot be compared
    how: list[str] = field(default_factory=list)  # for the user: what was changed in order to compare
    low: str = "float32"  # the lowest precision that is used
    normalized: bool = False  # whether there is batch normalization
    statistics: list[str] = field(default_factory=list)  # its running statistics
    synced: list[str] = field(default_factory=list)  # those that a step makes equal on all devices
    params: list[str] = field(default_factory=list)  # what is trained; empty: unknown
    soft: list[str] = field(default_factory=list)  # what is neither a parameter nor a buffer, such as a moment
    others: list[str] | None = None  # the arrays in other state; None: all of it
    adaptive: bool = True  # whether an optimizer may be one like Adam, or is unknown
    left: bool = False  # whether a step leaves gradients
    draws: bool = False  # whether a step draws random numbers, if known


@dataclass
class Session:
    """Steps that were taken one after the other."""

    start: list[Arrays] = field(default_factory=list)  # the parameters of each device before the first step
    kept: list[Arrays] = field(default_factory=list)  # other state then; empty: `rest` has only what has changed
    steps: list[StepResult] = field(default_factory=list)
    failure: str = ""  # why the steps ended early
    late: bool = False  # whether this was because of the time limit
    facts: Facts = field(default_factory=Facts)


def changes(before: list[Arrays], after: list[Arrays]) -> list[Arrays]:
    """What a step has changed. before, after: the parameters of each device."""
    return [{name: a - old[name] for name, a in new.items()} for old, new in zip(before, after)]


class Driver:
    """Takes steps with one framework."""

    unit = "device"  # or "process"
    divides = "the step"  # what divides a batch
    infers = False  # whether `split` only infers the examples from gradients
    uneven = True  # whether a batch can be uneven
    still = "update", "the steps on one device do not change the parameters; assign in place"  # if no step moves
    image_shape: Sequence[int] = (1, 28, 28)
    classes = 10
    advice: Mapping[str, str] = {  # what to do in this framework if something is wrong
        "not summed": "sum them before the update",
        "replicas": "sum all gradients before the update",
        "statistics": "average them, or send those of the first to the others",
        "left": "set them to 0 after each update",
    }

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

    def run(self, k: int, batches: Sequence[Any], options: Options = AS_WRITTEN) -> Session:
        """Take a step with each batch on k devices, with a fresh copy of the user's code."""
        raise NotImplementedError

    def finds_more(self, session: Session) -> bool:
        """If no step of a session changes a parameter: whether it trains something else, which counts from now on."""
        return False

    def clips(self) -> bool:
        """Whether a step has clipped gradients."""
        return False

    def missed(self) -> list[str]:
        """Lines, conditions and limits that no step has reached."""
        return []

    def stress(self) -> Mapping[str, Options]:
        """What may reach them, by what to say of it."""
        return {}

    def kept_apart(self, k: int, batches: Sequence[Any], options: Options) -> list[str]:
        """The names of what optimizers and the user keep after some steps on k devices, if it is not that on one."""
        return []

    def begins(self, k: int, batches: Sequence[Any], options: Options) -> str:
        """Where the last of some steps on k devices begins to differ from that on one, as the end of a sentence."""
        return ""

    def checks(self, k: int, is_wrong: bool, note: Callable[[str], None]) -> Iterator[Claim]:
        """What else can be said after the steps on k devices, most important first. is_wrong: if they differ. note:
        adds a line for the user."""
        yield from ()
