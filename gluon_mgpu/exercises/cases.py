"""Code that the checks share: it compares results with known mistakes, and records copies and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import Context
from mxnet.ndarray import NDArray

from gluon_mgpu.exercises import Mistake

Answer = Callable[..., Any]  # the learner's function
Numbers = list[np.ndarray]  # one array per device


def contexts(k: int) -> list[Context]:
    return [mx.cpu(i) for i in range(k)]


def values(arrays: Sequence[Any]) -> Numbers:
    """Convert each array, or list of arrays, to one flat NumPy array."""
    return [np.concatenate([a.asnumpy().ravel() for a in (x if isinstance(x, list) else [x])]) for x in arrays]


def same(found: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return len(found) == len(right) and all(
        f.shape == r.shape and np.allclose(f, r, rtol=1e-4, atol=1e-6) for f, r in zip(found, right)
    )


def shown(arrays: Sequence[np.ndarray]) -> str:
    return "  ".join(f"[{' '.join(f'{number:.4g}' for number in array.ravel())}]" for array in arrays)


def compare(case: str, found: Numbers, right: Numbers, mistakes: Mapping[str, Sequence[Sequence[np.ndarray]]]) -> None:
    """Raise the Mistake that explains the result, unless the result is correct.

    found, right: one array per device. mistakes: {name: results that this mistake can produce}; the first match counts.
    """
    if same(found, right):
        return
    names = [name for name, results in mistakes.items() if any(same(found, result) for result in results)]
    raise Mistake([*names, "wrong-result"][0], f"{case}\nexpected  {shown(right)}\nfound     {shown(found)}")


class Copy(NamedTuple):
    source: Context
    target: Context
    size: int


class Wait(NamedTuple):
    context: Context | None  # None: all devices


@contextmanager
def recording(on_wait: Callable[[Context | None], object] = lambda context: None) -> Iterator[list[Any]]:
    """Record copies between devices and calls that wait, in order. on_wait: called before each wait."""
    events: list[Any] = []
    copyto, asnumpy, wait_to_read = NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read
    library = mx.base._LIB  # waitall may have been imported under any name, but always calls this library
    wait_all = library.MXNDArrayWaitAll

    def copied(array: NDArray, other: NDArray | Context) -> NDArray:
        target = other if isinstance(other, Context) else other.context
        if target != array.context:
            events.append(Copy(array.context, target, array.size))
        return copyto(array, other)

    def waited(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*array: NDArray) -> Any:
            context = array[0].context if array else None
            events.append(Wait(context))
            on_wait(context)
            return function(*array)

        return wait

    NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read = copied, waited(asnumpy), waited(wait_to_read)
    library.MXNDArrayWaitAll = waited(wait_all)
    try:
        yield events
    finally:
        NDArray.copyto, NDArray.asnumpy, NDArray.wait_to_read = copyto, asnumpy, wait_to_read
        library.MXNDArrayWaitAll = wait_all


def copies(case: str, events: list[Any], needed: int, allow_numpy: bool = False) -> list[Copy]:
    """Returns the copies between devices. Raises Mistake if there are fewer than `needed`.

    allow_numpy: also accept copies through NumPy.
    """
    found = [event for event in events if isinstance(event, Copy)]
    waited = any(isinstance(event, Wait) for event in events)
    if len(found) < needed and not (waited and allow_numpy):
        case = f"{case}; copies between devices: {len(found)}, but at least {needed} are needed"
        raise Mistake("through-host" if waited else "no-copy", case)
    return found
