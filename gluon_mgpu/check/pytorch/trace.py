"""What the modules of a network compute in a step, and where it begins to differ from that on one process."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
from torch import Tensor, nn

from gluon_mgpu.check.pytorch.tensors import array_of

SIGNATURE = 8  # numbers that stand for a row


@dataclass
class Output:
    """An output of a module and its input: the signatures of their rows."""

    module: str
    output: np.ndarray
    input: np.ndarray | None


@dataclass
class Gradient:
    """The gradient of an output. number: of the event of this output."""

    module: str
    grad: np.ndarray
    number: int


Event = Union[Output, Gradient]


@contextmanager
def traced_modules(modules: Mapping[str, nn.Module], events: list[Event]) -> Iterator[None]:
    """Note the outputs of modules and their gradients, as they come."""

    def note(name: str, module: Any, inputs: Any, output: Any) -> None:
        tensor, given = _first(output), _first(inputs)
        if tensor is None or not tensor.ndim:
            return
        number, has_rows = len(events), given is not None and given.ndim
        events.append(Output(name, signatures(tensor), signatures(given) if has_rows else None))
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: events.append(Gradient(name, signatures(grad), number)))

    hooks = [module.register_forward_hook(functools.partial(note, name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(value: Any) -> Any:
    """The first tensor of a module's inputs or outputs."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and not hasattr(value, "placements") else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in map(_first, items) if found is not None), None)


def signatures(tensor: Tensor) -> np.ndarray:
    """A few numbers for each row of a tensor, by which it is found again."""
    rows = array_of(tensor).reshape(len(tensor), -1)
    return rows @ _projection(rows.shape[1])


@functools.lru_cache(maxsize=64)
def _projection(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, SIGNATURE))


def found_again(rows: np.ndarray, among: np.ndarray, tolerance: float = 1e-8) -> np.ndarray:
    """The index of each row among others, each used once; -1: there is none."""
    scale, used = tolerance * (np.abs(among).max(initial=0) + 1e-300), np.zeros(len(among), bool)
    found = np.full(len(rows), -1)
    for i, row in enumerate(rows):
        apart = np.abs(among - row).max(axis=1) if len(among) else np.zeros(0)
        apart[used] = math.inf
        if len(apart) and apart[best := int(apart.argmin())] <= scale:
            found[i], used[best] = best, True
    return found


def first_difference(several: Sequence[Sequence[Event]], one: Sequence[Event]) -> str:
    """The first module with another output, or another gradient of it, on a process, as the end of a sentence. Both
    sides are in float64, with the same events in the same order."""
    return next(filter(None, (_difference(events, one, process) for process, events in enumerate(several))), "")


def _difference(events: Sequence[Event], one: Sequence[Event], process: int) -> str:
    calls, its_calls = (Counter(event.module for event in side if isinstance(event, Output)) for side in (events, one))
    if others := [module for module in {**its_calls, **calls} if calls[module] != its_calls[module]]:
        module = min(others, key=lambda module: module.count("."))  # the outermost
        often, expected = (f"{n} times" if n != 1 else "once" for n in (calls[module], its_calls[module]))
        return f"; process {process} calls `{module}` {often}; if there is only one process, it calls it {expected}"
    rows = dict[int, np.ndarray]()  # of outputs: where on one process
    factor = None  # between the gradients of a backward pass, such as the number of processes
    for i, (mine, its) in enumerate(zip(events, one)):
        if mine.module != its.module:
            return ""
        if isinstance(mine, Output) and isinstance(its, Output):
            factor, rows[i] = None, found_again(mine.output, its.output)
            if (rows[i] < 0).any():
                is_same = _has_inputs(mine, its)
                if not is_same and len(rows) == 1:  # the rows of the batch itself are divided
                    return ""
                what = "the same input, another output" if is_same else "no example on one process has its input"
                return f"; it differs first in `{mine.module}` ({what}, on process {process})"
        elif isinstance(mine, Gradient) and isinstance(its, Gradient):
            grad, expected = mine.grad, its.grad[rows[mine.number]]
            if factor is None and expected.any():
                factor = float((grad * expected).sum() / (expected * expected).sum())
            if factor is not None and np.abs(grad - factor * expected).max() > 1e-6 * np.abs(factor * expected).max():
                return f"; it differs first in the gradient of the output of `{mine.module}` (on process {process})"
        else:
            return ""
    return ""


def _has_inputs(mine: Output, its: Output) -> bool:
    """Whether the inputs on a process are among those on one."""
    return mine.input is not None and its.input is not None and bool((found_again(mine.input, its.input) >= 0).all())
