"""Batch normalization on one process, of the examples of each process at a time, as several processes compute it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gluon_mgpu.check.driver import Shards
from gluon_mgpu.check.pytorch.trace import Event, Output, found_again, signatures

MOST = 5000  # rows that are found again


class Normalization:
    """modules: batch normalization, by name, which this changes."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = modules
        self.calls: list[list[Output]] = []
        self.shards: Shards = ()
        self.number = 0  # of the next call
        for name, module in modules.items():
            module.forward = functools.partial(self._forward, name)

    def start(self, events: Sequence[Sequence[Event]], shards: Shards) -> None:
        """Begin a step. events: what each of several processes noted in it. shards: the examples of each."""
        self.calls = [[e for e in of_one if isinstance(e, Output) and e.module in self.modules] for of_one in events]
        self.shards, self.number = shards, 0

    def _forward(self, name: str, x: Tensor) -> Tensor:
        module = self.modules[name]
        forward = functools.partial(type(module).forward, module)
        number, self.number = self.number, self.number + 1
        if not module.training:
            return forward(x)
        parts = self._parts(name, number, x) or self._neighbours(len(x))
        outputs = [forward(x[part]) for part in parts]
        return torch.cat(outputs)[np.argsort(np.concatenate(parts))]

    def _parts(self, name: str, number: int, x: Tensor) -> list[np.ndarray]:
        """The rows of each process in the order in which it had them; empty if they are not found."""
        calls = [calls[number] for calls in self.calls if len(calls) > number]
        if not calls or len(calls) < len(self.calls) or any(call.module != name for call in calls):
            return []
        inputs = [call.input for call in calls if call.input is not None]
        if sum(map(len, inputs)) != len(x) or len(x) > MOST:
            return []
        index = found_again(np.concatenate(inputs), signatures(x), 1e-8 if x.dtype == torch.float64 else 1e-4)
        return [] if (index < 0).any() else np.split(index, np.cumsum([*map(len, inputs)])[:-1])

    def _neighbours(self, rows: int) -> list[np.ndarray]:
        """The same, if the rows of an example are neighbours."""
        n = sum(map(len, self.shards))
        if rows % n:
            raise ValueError(f"batch normalization gets {rows} rows of a batch of {n}")
        each = np.arange(rows).reshape(n, -1)  # the rows of each example
        return [each[np.asarray(shard, int)].ravel() for shard in self.shards]
