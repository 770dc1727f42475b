"""Records what an answer does besides its results: copies between devices, waits and backward passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import mxnet as mx
from mxnet import Context
from mxnet.kvstore import KVStore
from mxnet.ndarray import NDArray


class Copy(NamedTuple):
    source: Context
    target: Context
    size: int


class Wait(NamedTuple):
    array: NDArray | None  # None: all arrays on all devices


class Backward(NamedTuple):
    gradients: list[list[NDArray]]  # of all parameters on each device, after this backward pass


class Call(NamedTuple):
    """A call of a function that the answer was given."""

    context: Context  # of its argument
    size: int  # the length of its argument


def _with_first(arrays: Any) -> list[tuple[NDArray, NDArray]]:
    """Pairs of arrays for a KVStore, one per device: the first for the same key, and each."""
    groups = [[arrays]] if isinstance(arrays, NDArray) else [arrays] if isinstance(arrays[0], NDArray) else arrays
    return [(group[0], array) for group in groups for array in group]


@contextmanager
def recording(
    on_wait: Callable[[NDArray | None], object] = lambda array: None, params: Sequence[Sequence[NDArray]] = ()
) -> Iterator[list[Any]]:
    """Record copies between devices, waits and backward passes, in order, of this whole process, by replacing MXNet's
    functions. on_wait: called before each wait. params: one list per device."""
    events: list[Any] = []
    library = mx.base._LIB  # waitall and backward may have been imported under any name, but always call this library
    copyto, differentiate = NDArray.copyto, library.MXAutogradBackwardEx
    push, pull = KVStore.push, KVStore.pull

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
        events.append(Backward([[p.grad.copy() for p in own] for own in params]))
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

    arrays: dict[str, Any] = {"copyto": copied, "asnumpy": waited(NDArray.asnumpy)}
    arrays["wait_to_read"] = waited(NDArray.wait_to_read)
    calls: dict[str, Any] = {"MXNDArrayWaitAll": waited(library.MXNDArrayWaitAll), "MXAutogradBackwardEx": backward}
    stores: dict[str, Any] = {"push": pushed, "pull": pulled, "pushpull": pushed_and_pulled}
    with patch.multiple(NDArray, **arrays), patch.multiple(library, **calls), patch.multiple(KVStore, **stores):
        yield events


def traffic(events: Sequence[Any]) -> tuple[Counter[Context], Counter[Context]]:
    """The number of elements that each device sent, and that it received."""
    sent, received = Counter[Context](), Counter[Context]()
    for copy in copies(events):
        sent[copy.source] += copy.size
        received[copy.target] += copy.size
    return sent, received


def copies(events: Sequence[Any]) -> list[Copy]:
    return [event for event in events if isinstance(event, Copy)]


def waits(events: Sequence[Any]) -> bool:
    return any(isinstance(event, Wait) for event in events)
