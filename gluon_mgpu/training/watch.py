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
from gluon_mgpu.training.state import LessonState
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


class UnsavedArrays:
    """Prints a notice if the second step changes variables of a lesson's module, which no checkpoint holds: arrays and
    numbers, also in attributes of its own objects, and a gluon.Trainer. The first step may only fill caches."""

    def __init__(self, lesson: Lesson, state: LessonState | None) -> None:
        self.lesson, self.state, self.steps, self.before = lesson, state, 0, dict[str, int]()

    def after_step(self) -> None:
        """Waits for the first two steps."""
        self.steps += 1
        if self.steps > 2:
            return
        saved = self.state.local() if self.state else {}
        self.saved = {id(array): array for array in saved.values()}
        kept = {name: value for name, value in vars(self.lesson.module).items() if name[:2] != "__"}
        now = {name: zlib.crc32(b"".join(self._contents(value))) for name, value in kept.items()}
        if changed := sorted(name for name in now if self.before.get(name, now[name]) != now[name]):
            log.say(
                f"{self.lesson.name}: each step changes {', '.join(changed)}, which a resumed run does not "
                "restore; to save arrays, define state(device) (docs/training.md)"
            )
        self.before = now

    def _contents(self, value: Any, depth: int = 0) -> Iterator[bytes]:
        if isinstance(value, gluon.Trainer):
            value = value.optimizer.num_update
        if id(value) in self.saved:
            return
        if isinstance(value, (NDArray, np.ndarray)):
            yield value.asnumpy().tobytes() if isinstance(value, NDArray) else value.tobytes()
        elif isinstance(value, (int, float)):
            yield repr(value).encode()
        elif depth < 4:  # objects may refer to each other
            if type(value).__module__ == self.lesson.module.__name__:
                value = getattr(value, "__dict__", value)
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            for part in parts:
                yield from self._contents(part, depth + 1)
