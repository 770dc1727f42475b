"""What the first steps with a user's own lesson show: which of its functions are not called, and which of its variables
change although no checkpoint holds them."""

from __future__ import annotations

import inspect
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any

import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

from gluon_mgpu.support import log
from gluon_mgpu.training import lessons
from gluon_mgpu.training.lessons import Lesson
from gluon_mgpu.training.step import Step

IN_A_STEP = ("train_batch", "split_and_load", "forward_backward", "lenet", "loss", "allreduce", "sgd")


def naming_what_it_does_not_call(step: Step, lesson: Lesson, others: Sequence[str]) -> Step:
    """The same step. After its first call, a notice names the functions that the user has changed, and that it has not
    called. others: those of IN_A_STEP that are called before."""
    is_first = True

    def watched(*args: Any) -> list[NDArray]:
        nonlocal is_first
        if not is_first:
            return step(*args)
        is_first, called = False, set[CodeType]()
        with noting_calls(lambda frame: called.add(frame.f_code)):
            losses = step(*args)
        names = [name for name in (*IN_A_STEP, "train") if name not in others and _is_changed(name, lesson)]
        if left_out := [name for name in names if code_of(getattr(lesson.module, name)) not in called]:
            log.say(f"a step does not call your own {', '.join(left_out)} in {lesson.name}, with these settings")
        return losses

    return watched


def _is_changed(name: str, lesson: Lesson) -> bool:
    """Whether a user's own lesson has a function that differs from the package's lesson."""
    own, original = (getattr(m, name, None) for m in (lesson.module, lessons.load(lesson.family)))
    if not (inspect.isfunction(own) and inspect.isfunction(original)) or own is original:
        return False
    with suppress(OSError, TypeError):  # one of them has no source
        return inspect.getsource(own) != inspect.getsource(original)
    return True


@contextmanager
def noting_calls(note: Callable[[FrameType], None]) -> Iterator[None]:
    """Call note(frame) whenever a Python function is called."""
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: note(frame) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(before)


def code_of(function: Any) -> CodeType | None:
    """The code of a function, without its decorators."""
    return getattr(inspect.unwrap(function), "__code__", None)


def naming_what_is_not_saved(step: Step, lesson: Lesson, saved: Callable[[], dict[str, NDArray]]) -> Step:
    """The same step. After its second call, a notice names the variables of the lesson's module that this call has
    changed, and that no checkpoint holds: arrays and numbers, also in attributes of its own objects, and a
    gluon.Trainer. The first call may only fill caches.

    saved: returns the arrays that checkpoints hold. The first two calls wait for the devices.
    """
    found = list[dict[str, int]]()  # {variable: checksum of what it contains}, after each of the first two calls

    def watched(*args: Any) -> list[NDArray]:
        losses = step(*args)
        if len(found) < 2:
            arrays = [*saved().values()]  # alive, so that no other object gets one of their ids
            held = {id(array) for array in arrays}
            kept = {name: value for name, value in vars(lesson.module).items() if name[:2] != "__"}
            contents = {name: _contents(value, lesson, held) for name, value in kept.items()}
            found.append({name: zlib.crc32(b"".join(parts)) for name, parts in contents.items()})
            first, last = found[0], found[-1]
            if changed := sorted(name for name in last if first.get(name, last[name]) != last[name]):
                log.say(
                    f"{lesson.name}: each step changes {', '.join(changed)}, which a resumed run does not "
                    "restore; to save arrays, define state(device) (docs/training.md)"
                )
        return losses

    return watched


def _contents(value: Any, lesson: Lesson, held: set[int], depth: int = 0) -> Iterator[bytes]:
    """The arrays and numbers that a variable leads to, except the arrays with these ids."""
    if isinstance(value, gluon.Trainer):
        value = value.optimizer.num_update
    if id(value) in held:
        return
    if isinstance(value, (NDArray, np.ndarray)):
        yield value.asnumpy().tobytes() if isinstance(value, NDArray) else value.tobytes()
    elif isinstance(value, (int, float)):
        yield repr(value).encode()
    elif depth < 4:  # objects may refer to each other
        if type(value).__module__ == lesson.module.__name__:
            value = getattr(value, "__dict__", value)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        for part in parts:
            yield from _contents(part, lesson, held, depth + 1)
