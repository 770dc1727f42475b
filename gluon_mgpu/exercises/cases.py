"""Code that the checks share: it compares results with known mistakes, and records copies and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import Context
from mxnet.ndarray import NDArray
from numpy import allclose  # here, because an answer may replace np.allclose

from gluon_mgpu.exercises import Mistake

Answer = Callable[..., Any]  # the learner's function
Numbers = list[np.ndarray]  # one array per device
Known = Mapping[str, Any]  # {mistake: whether it was made, or a list of the results that it can produce}


def contexts(k: int) -> list[Context]:
    return [mx.cpu(i) for i in range(k)]


def vectors(k: int, n: int) -> Numbers:
    """k vectors of n positive integers."""
    return list(np.random.RandomState(k + n).randint(1, 100, (k, n)).astype(float))


def on_devices(arrays: Sequence[np.ndarray]) -> list[NDArray]:
    """Copy array i to device i."""
    return [mx.nd.array(x, ctx=c) for x, c in zip(arrays, contexts(len(arrays)))]


def values(arrays: Sequence[Any]) -> Numbers:
    """Convert each array, or list of arrays, to one flat NumPy array."""
    return [np.concatenate([a.asnumpy().ravel() for a in (x if isinstance(x, list) else [x])]) for x in arrays]


def listed(found: Any, ctx: Sequence[Context] = (), shape: tuple[int, ...] = ()) -> list[NDArray]:
    """Returns what the answer returned, if it is a list of arrays: one on each device in ctx, of this shape."""
    if found is None:
        raise Mistake("no-return", "the function returned None")
    if not isinstance(found, (list, tuple)) or not all(isinstance(array, NDArray) for array in found):
        kinds = {type(x).__name__ for x in (found if isinstance(found, (list, tuple)) else [found])}
        raise Mistake("wrong-type", f"the function returned {' and '.join(kinds)}; expected NDArrays in a list")
    if ctx and [array.context for array in found] != [*ctx]:
        raise Mistake("wrong-device", f"expected an array on each of {ctx}; found {[a.context for a in found]}")
    if shape and any(array.shape != shape for array in found):
        raise Mistake("wrong-shape", f"expected arrays of shape {shape}; found {[array.shape for array in found]}")
    return list(found)


def number(found: Any) -> float:
    """Returns the number that the answer returned. An array of one element is a number too."""
    if isinstance(found, NDArray):
        found = found.asnumpy().squeeze()
    if isinstance(found, (str, bool, type(None))) or np.shape(found):
        raise Mistake("no-return" if found is None else "wrong-type", f"expected a number; found {found!r}")
    return float(found)


def same(found: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return len(found) == len(right) and all(
        f.shape == r.shape and allclose(f, r, rtol=1e-4, atol=1e-6) for f, r in zip(found, right)
    )


def shown(arrays: Sequence[np.ndarray]) -> str:
    return "  ".join(f"[{' '.join(f'{number:.4g}' for number in array.ravel())}]" for array in arrays)


def first(case: str, mistakes: Mapping[str, object]) -> None:
    """Raise the first Mistake whose condition holds."""
    for name, made in mistakes.items():
        if made:
            raise Mistake(name, case)


def compare(
    case: str, found: Numbers, right: Numbers | np.ndarray, mistakes: Known, before: Numbers | None = None
) -> None:
    """Raise the Mistake that explains the result, unless the result is correct. The first match counts.

    found, right: one array per device. right and the results in mistakes may also be a single array (n,), if it is the
    same on all devices. before: the values before the call, if the function changes them.
    """

    def on_each(result: Any) -> Numbers:
        return [result] * len(found) if np.ndim(result[0]) == 0 else list(result)

    right = on_each(right)
    if same(found, right):
        return
    made = {
        name: results if isinstance(results, (bool, np.bool_)) else any(same(found, on_each(r)) for r in results)
        for name, results in mistakes.items()
    }
    shown_case = f"{case}\nexpected  {shown(right)}\nfound     {shown(found)}"
    first(shown_case, made)
    name, hint = _unknown(found, right, before)
    raise Mistake(name, f"{shown_case}{hint}")


def _unknown(found: Numbers, right: Numbers, before: Numbers | None) -> tuple[str, str]:
    """Describe a result that no known mistake explains. Returns a name in mistakes.ini, and a line for the case."""
    sizes = [array.size for array in found], [array.size for array in right]
    if sizes[0] != sizes[1]:
        return "wrong-size", f"\nnumbers of elements: expected {sizes[1]}, found {sizes[0]}"
    before = before or [np.full(array.size, np.nan) for array in right]  # nothing is equal to nan
    result, wanted, start = map(np.concatenate, (found, right, before))
    if not result.any():
        return "zeros", ""
    for what, done, needed in (("changes: ", result - start, wanted - start), ("", result, wanted)):
        factor = done @ needed / max(needed @ needed, 1e-9)
        if factor and allclose(done, factor * needed, rtol=1e-3, atol=1e-6):
            name = "wrong-sign" if np.isclose(factor, -1, rtol=1e-3) else "wrong-factor"
            return name, f"\n{what}found / expected = {factor:.4g}"
    wrong = [i for i in range(len(found)) if not same(found[i : i + 1], right[i : i + 1])]
    if len(wrong) < len(found):
        unchanged = all(np.array_equal(found[i], before[i]) for i in wrong)
        devices = ", ".join(f"device {i}" for i in wrong)
        return "unchanged-devices" if unchanged else "some-devices", f"\nwrong on: {devices}"
    elements = [i for i in range(min(sizes[1])) if all(np.isclose(f[i], r[i]) for f, r in zip(found, right))]
    if elements:
        unchanged = bool(np.all(np.isclose(result, wanted) | np.isclose(result, start)))
        return "unchanged-elements" if unchanged else "some-elements", f"\nright on all devices: elements {elements}"
    equal = same(right, [right[0]] * len(right)) and not same(found, [found[0]] * len(found))
    return "different-devices" if equal else "wrong-result", ""


class Copy(NamedTuple):
    source: Context
    target: Context
    size: int


class Wait(NamedTuple):
    array: NDArray | None  # None: all arrays on all devices


@contextmanager
def recording(on_wait: Callable[[NDArray | None], object] = lambda array: None) -> Iterator[list[Any]]:
    """Record copies between devices, waits and backward passes, in order. on_wait: called before each wait."""
    events: list[Any] = []
    copyto, asnumpy, wait_to_read = NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read
    library = mx.base._LIB  # waitall and backward may have been imported under any name, but always call this library
    wait_all, differentiate = library.MXNDArrayWaitAll, library.MXAutogradBackwardEx

    def copied(array: NDArray, other: NDArray | Context) -> NDArray:
        target = other if isinstance(other, Context) else other.context
        if target != array.context:
            events.append(Copy(array.context, target, array.size))
        return copyto(array, other)

    def waited(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*array: NDArray) -> Any:
            events.append(Wait(*array or [None]))
            on_wait(events[-1].array)
            return function(*array)

        return wait

    def backward(*arguments: Any) -> Any:
        events.append("backward")
        return differentiate(*arguments)

    NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read = copied, waited(asnumpy), waited(wait_to_read)
    library.MXNDArrayWaitAll, library.MXAutogradBackwardEx = waited(wait_all), backward
    try:
        yield events
    finally:
        NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read = copyto, asnumpy, wait_to_read
        library.MXNDArrayWaitAll, library.MXAutogradBackwardEx = wait_all, differentiate


def copies(case: str, events: list[Any], needed: int, allow_numpy: bool = False) -> list[Copy]:
    """Returns the copies between devices. Raises Mistake if they have fewer than `needed` elements.

    allow_numpy: also accept copies through NumPy.
    """
    found = [event for event in events if isinstance(event, Copy)]
    waited = any(isinstance(event, Wait) for event in events)
    copied = sum(copy.size for copy in found)
    if copied < needed and not (waited and allow_numpy):
        case = f"{case}; elements copied between devices: {copied}, but at least {needed} are needed"
        raise Mistake("through-host" if waited else "no-copy", case)
    return found
