"""Finds the values that a user's own lesson keeps from step to step, which a checkpoint would not hold."""

from __future__ import annotations

import zlib
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from mxnet.ndarray import NDArray

from gluon_mgpu.runtime import log
from gluon_mgpu.training.lessons import is_unchanged, name_of

LIBRARIES = ("gluon_mgpu", "mxnet", "numpy")  # whose functions keep nothing for a lesson


class LessonState:
    """Prints a notice if a lesson keeps values that each step changes, unless the lesson has a function `state`.

    It compares them after the first and the second step, because the first one may only fill caches. This waits for
    both steps.
    """

    def __init__(self, lesson: ModuleType, saves: bool) -> None:
        """saves: whether the run writes checkpoints; if not, nothing is compared."""
        self.lesson, self.steps, self.first = lesson, 0, dict[str, int]()
        self.is_watched = saves and not (is_unchanged(lesson) or callable(getattr(lesson, "state", None)))

    def after_step(self) -> None:
        self.steps += 1
        if not self.is_watched or self.steps > 2:
            return
        own = {name: value for name, value in vars(self.lesson).items() if not name.startswith("__")}
        kept = {name: _checksum(value, self.lesson, set()) for name, value in own.items()}
        changed = [name for name in kept if self.steps == 2 and kept[name] != self.first.get(name)]
        if changed:
            log.say(
                f"{name_of(self.lesson)}: each step changes {', '.join(changed)}, which a resumed run lacks; "
                "to save arrays, define state(device) (docs/training.md)"
            )
        self.first = kept


def _checksum(value: Any, lesson: ModuleType, seen: set[int]) -> int:
    """A number that differs, very likely, if anything that a value of this lesson holds differs."""
    if id(value) in seen or isinstance(value, ModuleType):
        return 0
    seen.add(id(value))
    if isinstance(value, NDArray):
        value = value.asnumpy()
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    parts: list[Any] = []
    if isinstance(value, FunctionType):
        if str(value.__module__).split(".")[0] in LIBRARIES:
            return 0
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [vars(value), value.__defaults__, value.__kwdefaults__, cells]
    elif isinstance(value, dict):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [*value]
    elif isinstance(value, np.random.Generator):
        parts = [value.bit_generator.state]
    elif isinstance(value, type):
        parts = [vars(value)] if value.__module__ == lesson.__name__ else []
    elif isinstance(value, (int, float, str, bytes, type(None))):
        return zlib.crc32(repr(value).encode())
    else:
        parts = [getattr(value, "__dict__", None) or repr(value)]
    return hash(tuple(_checksum(part, lesson, seen) for part in parts))
