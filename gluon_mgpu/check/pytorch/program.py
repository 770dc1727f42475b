"""What the user wrote: functions that make a state, take a step, and draw a batch; or a file that has them."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

from gluon_mgpu.check.accuracy import of_file
from gluon_mgpu.check.driver import Driver
from gluon_mgpu.check.processes import where
from gluon_mgpu.check.pytorch.tensors import copy_of, rows_of
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.support.programs import execute

LR = 0.1


@dataclass(frozen=True)
class Batch:
    """Batch i, of n examples, or some of its examples. Each process has its own copy of the data."""

    i: int
    n: int
    examples: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.n if self.examples is None else len(self.examples)

    @property
    def whole(self) -> Batch:
        return replace(self, examples=None)

    def take(self, examples: Sequence[int]) -> Batch:
        return replace(self, examples=tuple((self.examples or range(self.n))[i] for i in examples))


@dataclass
class Program:
    """The functions and options of `pytorch.parallel`. drawn: the whole batches."""

    make: Callable[[int, int], Any]
    step: Callable[[Any, Any], Any]
    draw: Callable[[int, int], Any]
    reference: Callable[[Any, Any], Any] | None = None
    divide: str = "none"
    trains_given: bool = False  # whether what a step is given besides networks is trained, as by functional_call
    drawn: dict[Batch, Any] = field(default_factory=dict)

    def add(self, batch: Batch) -> None:
        """Draw a batch for the processes that are started after this."""
        seed_all(batch.i)
        self.drawn[batch] = self.draw(batch.i, batch.n)

    def load(self) -> None:
        """What each process does first."""

    def whole(self, batches: Sequence[Batch]) -> list[Any]:
        """The data of each batch, with all of its examples."""
        return [self.drawn[batch.whole] for batch in batches]

    def part(self, data: Any, n: int, rank: int, world: int) -> Any:
        """What a process gets of a batch of n examples."""
        if world == 1 or self.divide == "none":
            return data
        return copy_of(data, n, divided(self.divide, world, rows_of(data, n))[rank])

    def named(self, state: Any) -> Any:
        """What a step is given, with names if they are known."""
        return state

    def function(self) -> Callable[..., Any]:
        """The user's function, in this process."""
        return self.step


class FileProgram(Program):
    """A file, which each process executes again. Its step gets whole batches, and divides them."""

    def __init__(self, file: str) -> None:
        super().__init__(self._make, self._step, self._images)
        self.file = file
        self.has_accuracy = "evaluate_accuracy" in Path(file).read_text(errors="replace")

    def load(self) -> None:
        self.module = execute("step", self.file)

    def function(self) -> Callable[..., Any]:
        return self.module.train_batch

    def _make(self, rank: int, world: int) -> Sequence[Any]:
        """The arguments of a step after those of the batch."""
        if not hasattr(self.module, "init_net"):
            return [self.module.init_params(), LR]
        found = self.module.init_net(LR)
        return found if isinstance(found, (list, tuple)) else [found]

    def _step(self, state: Sequence[Any], batch: Any) -> Any:
        is_nest = isinstance(batch, (list, tuple))
        is_one = is_nest and len(batch) > 1 and len(self._arguments()) == len(state) + 1  # such as a list of examples
        return self.module.train_batch(*(batch if is_nest and not is_one else [batch]), *state)

    def named(self, state: Sequence[Any]) -> Any:
        if not hasattr(self.module, "init_net"):
            return {"params": state[0]}
        names = self._arguments()
        return dict(zip(names[-len(state) :], state)) if 0 < len(state) < len(names) else state

    def _arguments(self) -> Sequence[str]:
        """The names of what a step needs, if they are known."""
        with suppress(ValueError, TypeError):  # it has no signature
            parameters = inspect.signature(self.module.train_batch).parameters.values()
            return [p.name for p in parameters if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
        return []

    def _images(self, i: int, n: int) -> Any:
        X, y = Driver().batch(i, n)
        return torch.tensor(X), torch.tensor(y, dtype=torch.int64)

    def whole(self, batches: Sequence[Batch]) -> list[Any]:
        """From the file's own `example_batch(n)`, if it has one; each process draws all batches, in the same order."""
        if not hasattr(self.module, "example_batch"):
            return super().whole(batches)
        with _seeded_generators(self.module):
            for batch in sorted(self.drawn, key=lambda batch: (batch.n, batch.i)):
                seed_all(batch.i)
                try:
                    self.drawn[batch] = self.module.example_batch(batch.n)
                except Exception as error:
                    raise UsageError(None, self.file, f"example_batch fails: {where(error)}") from error
        return super().whole(batches)

    def accuracy(self, rank: int, world: int) -> str:
        """What is wrong with the file's `evaluate_accuracy`."""
        seed_all(rank)
        self.load()
        model, *_ = self._make(rank, world)
        net = model.eval() if isinstance(model, nn.Module) else None
        X, _ = self._images(0, 11)
        return of_file(self.module, X, torch.tensor, model, net)


@contextmanager
def _seeded_generators(module: ModuleType) -> Iterator[None]:
    """In this block, NumPy's default_rng has the seed 0, unless it is given one, whatever a module calls it."""
    default_rng = np.random.default_rng

    def seeded(seed: Any = None) -> Any:
        return default_rng(0 if seed is None else seed)

    with ExitStack() as patches:
        for place in np.random, module:
            for name in [name for name, value in vars(place).items() if value is default_rng]:
                patches.enter_context(mock.patch.object(place, name, seeded))
        yield


def divided(how: str, k: int, n: int) -> list[list[int]]:
    """The examples of each process. how: "contiguous" or "strided"."""
    return [[*range(n)][r::k] if how == "strided" else np.array_split(range(n), k)[r].tolist() for r in range(k)]


def seed_all(number: int) -> None:
    """Seed all generators: with the rank, so that only what is sent, or drawn with a seed of its own, is equal."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)
