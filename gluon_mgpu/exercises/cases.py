"""Code that the hidden cases share: it compares results with known mistakes, and records copies and waits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import Context
from mxnet.ndarray import NDArray
from numpy import allclose  # here, because an answer may replace np.allclose

from gluon_mgpu.exercises import Mistake

Function = Callable[..., Any]  # the learner's function
Numbers = list[np.ndarray]  # one array per device
Known = Mapping[str, Any]  # {mistake: whether it was made, or a list of the results that it can produce}


def contexts(k: int) -> list[Context]:
    return [mx.cpu(i) for i in range(k)]


def vectors(k: int, n: int) -> Numbers:
    """k vectors of n positive integers."""
    return list(np.random.RandomState(k + n).randint(1, 100, (k, n)).astype(float))


def linear(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A batch for a linear model: X (n, 2), y (n,)."""
    random = np.random.RandomState(seed)
    return random.normal(size=(n, 2)), random.normal(size=n)


def gradient_of(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    return ((X @ w - y)[:, None] * X).sum(axis=0)


def gradients_of(X: np.ndarray, y: np.ndarray, w: np.ndarray, k: int) -> Numbers:
    """The gradients of k shards of nearly equal size."""
    return [gradient_of(*shard, w) for shard in zip(np.array_split(X, k), np.array_split(y, k))]


def on_devices(arrays: Sequence[np.ndarray]) -> list[NDArray]:
    """Copy array i to device i."""
    return [mx.nd.array(x, ctx=c) for x, c in zip(arrays, contexts(len(arrays)))]


def values(arrays: Sequence[Any]) -> Numbers:
    """Convert each array, or list of arrays, to one flat NumPy array."""
    return [np.concatenate([a.asnumpy().ravel() for a in (x if isinstance(x, list) else [x])]) for x in arrays]


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


def listed(found: Any, ctx: Sequence[Context] = (), shape: tuple[int, ...] = ()) -> list[NDArray]:
    """Returns what the answer returned, if it is a list of arrays: one on each device in ctx, of this shape."""
    if found is None:
        raise Mistake("no-return", "the function returned None")
    if not isinstance(found, (list, tuple)) or not all(isinstance(array, NDArray) for array in found):
        raise Mistake("wrong-type", f"the function returned {_type_of(found)}; expected a list of NDArrays")
    devices = [array.context for array in found]
    if ctx and len(found) != len(ctx):
        raise Mistake("wrong-number", f"expected {len(ctx)} arrays, one per device; found {len(found)}")
    if ctx and devices != [*ctx]:
        raise Mistake("wrong-device", f"expected an array on each of {ctx}; found {devices}")
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


def operations(arrays: Numbers) -> Numbers:
    """What other operations compute, instead of the sum over the devices."""
    others = [operation(arrays, axis=0) for operation in (np.max, np.min, np.prod, np.median)]
    return [*others, 2 * arrays[0] - np.sum(arrays, axis=0)]


def raise_first(case: str, mistakes: Mapping[str, object]) -> None:
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
    raise_first(shown_case, made)
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
        if not np.isfinite(factor) or not allclose(done, factor * needed, rtol=1e-3, atol=1e-6):
            continue
        simple = float(Fraction(abs(float(factor))).limit_denominator(12))
        if factor and (len(set(needed)) > 2 or math.isclose(abs(factor), simple, rel_tol=1e-4)):  # any fits one number
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


class Backward(NamedTuple):
    gradients: list[NDArray]  # those of all params, after this backward pass


def _with_first(arrays: Any) -> list[tuple[NDArray, NDArray]]:
    """Pairs of arrays for a KVStore, one per device: the first for the same key, and each."""
    groups = [[arrays]] if isinstance(arrays, NDArray) else [arrays] if isinstance(arrays[0], NDArray) else arrays
    return [(group[0], array) for group in groups for array in group]


@contextmanager
def recording(
    on_wait: Callable[[NDArray | None], object] = lambda array: None, params: Sequence[NDArray] = ()
) -> Iterator[list[Any]]:
    """Record copies between devices, waits and backward passes, in order. on_wait: called before each wait."""
    events: list[Any] = []
    copyto, asnumpy, wait_to_read = NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read
    library = mx.base._LIB  # waitall and backward may have been imported under any name, but always call this library
    wait_all, differentiate = library.MXNDArrayWaitAll, library.MXAutogradBackwardEx
    push, pull, pushpull = mx.kv.KVStore.push, mx.kv.KVStore.pull, mx.kv.KVStore.pushpull

    def between(source: Context, target: Context, size: int) -> None:
        if source != target:
            events.append(Copy(source, target, size))

    def copied(array: NDArray, other: NDArray | Context) -> NDArray:
        between(array.context, other if isinstance(other, Context) else other.context, array.size)
        return copyto(array, other)

    def waited(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*array: NDArray) -> Any:
            events.append(Wait(*array or [None]))
            on_wait(events[-1].array)
            return function(*array)

        return wait

    def backward(*arguments: Any) -> Any:
        done = differentiate(*arguments)
        events.append(Backward([p.grad.copy() for p in params]))
        return done

    def pushed(store: Any, key: Any, value: Any, *options: Any, **named: Any) -> Any:
        for first, array in _with_first(value):
            between(array.context, first.context, array.size)
        return push(store, key, value, *options, **named)

    def pulled(store: Any, key: Any, out: Any, *options: Any, **named: Any) -> Any:
        for first, array in _with_first(out):
            between(first.context, array.context, array.size)
        return pull(store, key, out, *options, **named)

    def pushed_and_pulled(store: Any, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        pushed(store, key, value, priority)
        pulled(store, key, value if out is None else out, priority)

    NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read = copied, waited(asnumpy), waited(wait_to_read)
    library.MXNDArrayWaitAll, library.MXAutogradBackwardEx = waited(wait_all), backward
    mx.kv.KVStore.push, mx.kv.KVStore.pull, mx.kv.KVStore.pushpull = pushed, pulled, pushed_and_pulled
    try:
        yield events
    finally:
        NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read = copyto, asnumpy, wait_to_read
        library.MXNDArrayWaitAll, library.MXAutogradBackwardEx = wait_all, differentiate
        mx.kv.KVStore.push, mx.kv.KVStore.pull, mx.kv.KVStore.pushpull = push, pull, pushpull


def only_queues(case: str, events: list[Any]) -> None:
    if any(isinstance(event, Wait) for event in events):
        raise Mistake("waits", case)


def traffic(events: list[Any]) -> tuple[Counter[Context], Counter[Context]]:
    """The number of elements that each device sent, and that it received."""
    sent, received = Counter[Context](), Counter[Context]()
    for copy in (event for event in events if isinstance(event, Copy)):
        sent[copy.source] += copy.size
        received[copy.target] += copy.size
    return sent, received


def copies(case: str, events: list[Any], needed: int, allow_numpy: bool = False) -> list[Copy]:
    """Returns the copies between devices. Raises Mistake if they have fewer than `needed` elements, or if the answer
    waits.

    allow_numpy: also accept waits, and copies through NumPy.
    """
    found = [event for event in events if isinstance(event, Copy)]
    waited = any(isinstance(event, Wait) for event in events)
    copied = sum(copy.size for copy in found)
    if copied < needed and not (waited and allow_numpy):
        case = f"{case}; elements copied between devices: {copied}, but at least {needed} are needed"
        raise Mistake("through-host" if waited else "no-copy", case)
    if not allow_numpy:
        only_queues(case, events)
    return found
