"""What the hidden cases share: a case, its input, reading what an answer returned, and what counts besides results."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import Context
from mxnet.ndarray import NDArray
from numpy import allclose  # here, because an answer may replace np.allclose

from gluon_mgpu.exercises import Mistake
from gluon_mgpu.exercises.cases.events import copies, traffic, waits

Function = Callable[..., Any]  # the learner's function
Numbers = list[np.ndarray]  # one flat array per device
Results = dict[str, Numbers]  # {what they are: the numbers}, in the order in which they are compared
REPLACED = "replaced"  # an event: an element of a list, or an array of a network, is another array now


class Trial(NamedTuple):
    """What a function did with an input. events: see `events`. notes: what else tells mistakes apart, and is shown."""

    results: Results
    events: list[Any]
    notes: Results = {}


class Case(NamedTuple):
    """One input, on which an answer, our solution and known mistakes are tried.

    text: describes the input. call: calls a function on a new copy of the input. before: results as they were before
    the call, if it changes them in place. check: receives the events of a call that had the right results, and raises a
    Mistake if it did not work as the task says. mistakes: names results that no known mistake explains; given the
    answer's trial and our solution's, returns {mistake: whether it was made}.
    """

    text: str
    call: Callable[[Function], Trial]
    before: Mapping[str, Numbers] = {}
    check: Callable[[list[Any]], object] = lambda events: None
    mistakes: Callable[[Trial, Trial], Mapping[str, object]] = lambda mine, right: {}


def inputs(*rows: Any) -> Callable[[Callable[..., Case]], Callable[[], list[Case]]]:
    """Decorates a function that makes a case: it becomes a function that makes one for each row of arguments."""
    return lambda function: lambda: [function(*row) for row in rows]


def contexts(k: int) -> list[Context]:
    return [mx.cpu(i) for i in range(k)]


def vectors(k: int, n: int) -> Numbers:
    """k vectors of n positive integers."""
    return list(np.random.RandomState(k + n).randint(1, 100, (k, n)).astype(float))


def linear(n: int, d: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A batch for a linear model: X (n, d), y (n,)."""
    random = np.random.RandomState(seed)
    return random.normal(size=(n, d)), random.normal(size=n)


def on_devices(arrays: Sequence[np.ndarray]) -> list[NDArray]:
    """Copy array i to device i."""
    return [mx.nd.array(x, ctx=c) for x, c in zip(arrays, contexts(len(arrays)))]


def values(arrays: Sequence[Any]) -> Numbers:
    """Convert each array, or list of arrays, to one flat NumPy array."""
    return [np.concatenate([a.asnumpy().ravel() for a in (x if isinstance(x, list) else [x])]) for x in arrays]


def same(found: Numbers, right: Numbers) -> bool:
    return len(found) == len(right) and all(
        f.shape == r.shape and allclose(f, r, rtol=1e-4, atol=1e-6, equal_nan=True) for f, r in zip(found, right)
    )


def _type_of(found: Any) -> str:
    if not isinstance(found, (list, tuple)):
        return type(found).__name__
    return f"a {type(found).__name__} of {' and '.join(sorted({type(x).__name__ for x in found})) or 'nothing'}"


def array(found: Any) -> NDArray:
    """Returns what the answer returned, if it is an array."""
    if found is None:
        raise Mistake("no-return", "the function returned None")
    if not isinstance(found, NDArray):
        raise Mistake("wrong-type", f"the function returned {_type_of(found)}; expected an NDArray")
    return found


def listed(found: Any, ctx: Sequence[Context] = ()) -> list[NDArray]:
    """Returns what the answer returned, if it is a list of arrays: one on each device in ctx."""
    if found is None:
        raise Mistake("no-return", "the function returned None")
    if not isinstance(found, (list, tuple)) or not all(isinstance(array, NDArray) for array in found):
        raise Mistake("wrong-type", f"the function returned {_type_of(found)}; expected a list of NDArrays")
    devices = [array.context for array in found]
    if ctx and len(found) != len(ctx):
        raise Mistake("wrong-number", f"expected {len(ctx)} arrays, one per device; found {len(found)}")
    if ctx and devices != [*ctx]:
        raise Mistake("wrong-device", f"expected an array on each of {ctx}; found {devices}")
    return list(found)


def check_shapes(text: str, arrays: Sequence[NDArray], shape: tuple[int, ...]) -> None:
    """Check the shapes of arrays that have the right number of elements."""
    if any(array.shape != shape and array.size == math.prod(shape) for array in arrays):
        found = [array.shape for array in arrays]
        raise Mistake("wrong-shape", f"{text}; expected arrays of shape {shape}; found {found}")


def replaced(arrays: Sequence[Sequence[NDArray]], given: Sequence[Sequence[NDArray]]) -> list[str]:
    """An event, if an element of the lists that an answer was given is no longer the caller's array."""
    same_lists = all(len(own) == len(now) and all(map(operator.is_, own, now)) for own, now in zip(arrays, given))
    return [] if same_lists else [REPLACED]


def number(found: Any) -> float:
    """Returns the number that the answer returned. An array of one element is a number too."""
    if isinstance(found, NDArray):
        found = found.asnumpy().squeeze()
    if isinstance(found, (str, bool, type(None))) or np.shape(found):
        raise Mistake("no-return" if found is None else "wrong-type", f"expected a number; found {found!r}")
    return float(found)


def shown(arrays: Sequence[np.ndarray]) -> str:
    return "  ".join(f"[{' '.join(f'{number:.4g}' for number in array.ravel())}]" for array in arrays)


def first(mistakes: Mapping[str, object]) -> str:
    """The first mistake that was made, of {mistake: whether it was made}; "" if none was."""
    return next((name for name, made in mistakes.items() if made), "")


def raise_first(text: str, mistakes: Mapping[str, object]) -> None:
    if name := first(mistakes):
        raise Mistake(name, text)


def check_copies(
    text: str, events: list[Any], needed: int = 0, most: float = math.inf, allow_numpy: bool = False
) -> None:
    """Check that at least `needed` elements were copied between devices, that no device sent or received more than
    `most`, and that the answer did not wait. allow_numpy: also accept waits, and copies through NumPy."""
    copied = sum(copy.size for copy in copies(events))
    if copied < needed and not (waits(events) and allow_numpy):
        text = f"{text}; elements copied between devices: {copied}, but at least {needed} are needed"
        raise Mistake("through-host" if waits(events) else "no-copy", text)
    found = max((max(elements.values()) for elements in traffic(events) if elements), default=0)
    if found > most:
        text = f"{text}; a device sends or receives {found} elements; {most} are enough"
        raise Mistake("too-much-traffic", text)
    if waits(events) and not allow_numpy:
        raise Mistake("waits", text)
