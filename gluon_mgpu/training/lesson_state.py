"""What a lesson's module keeps from step to step: `kept` finds it, wherever it is, and `keep` puts it back.

`check` gives each of the models that it compares its own copy. `LessonState` names what a checkpoint would not hold.
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

from gluon_mgpu.support import log
from gluon_mgpu.training.lessons import is_unchanged, name_of

DEFAULTS = ("__defaults__", "__kwdefaults__")
LIBRARIES = ("gluon_mgpu", "mxnet", "numpy")  # whose functions keep nothing for a lesson
Kept = dict[tuple[int, str, Any], Any]  # {(index in `_owners`, "variable" or "cell", name or index): value}


def kept(lesson: ModuleType) -> Kept:
    """The values in a lesson's module, in its classes, and in its functions: attributes, defaults and closures."""
    values: Kept = {}
    for i, owner in enumerate(_owners(lesson)):
        names = [name for name, value in vars(owner).items() if _is_value(value) and not name.startswith("__")]
        if isinstance(owner, FunctionType):
            names += DEFAULTS
            values |= {(i, "cell", j): cell.cell_contents for j, cell in enumerate(_cells(owner))}
        values |= {(i, "variable", name): getattr(owner, name) for name in names}
    return values


def keep(lesson: ModuleType, values: Kept) -> None:
    """Put what `kept` returned, or a copy of it, back into a lesson's module."""
    owners = _owners(lesson)
    for i, kind, name in kept(lesson).keys() - values.keys():
        if kind == "variable":
            delattr(owners[i], name)
    for (i, kind, name), value in values.items():
        if kind == "cell":
            _cells(owners[i])[name].cell_contents = value
        else:
            setattr(owners[i], name, value)


def copied(values: Kept) -> Kept:
    """Copies of all values. What cannot be copied, such as a lock, is shared."""
    memo: dict[int, Any] = {}
    copies = dict(values)
    for key, value in values.items():
        with suppress(Exception):
            copies[key] = copy.deepcopy(value, memo)
    return copies


@contextmanager
def copyable() -> Iterator[None]:
    """Let copy.deepcopy copy arrays to their own device, and share networks and trainers."""
    copies: dict[type, Callable[..., Any]] = {NDArray: lambda array, _: array.copy()}
    copies |= dict.fromkeys((gluon.Block, gluon.Parameter, gluon.Trainer), lambda value, _: value)
    for kind, function in copies.items():
        kind.__deepcopy__ = function  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for kind in copies:
            del kind.__deepcopy__  # type: ignore[attr-defined]


class LessonState:
    """Prints a notice if a lesson keeps values that each step changes, unless the lesson has a function `state`.

    It compares them after the first and the second step, because the first one may only fill caches. This waits for
    both steps.
    """

    def __init__(self, lesson: ModuleType, saves: bool) -> None:
        """saves: whether the run writes checkpoints; if not, nothing is compared."""
        self.lesson, self.steps, self.first = lesson, 0, dict[Any, int]()
        self.is_watched = saves and not (is_unchanged(lesson) or callable(getattr(lesson, "state", None)))

    def after_step(self) -> None:
        self.steps += 1
        if not self.is_watched or self.steps > 2:
            return
        now = {place: _checksum(value, set()) for place, value in kept(self.lesson).items()}
        changed = [place for place in now if self.steps == 2 and now[place] != self.first.get(place)]
        if changed:
            names = dict.fromkeys(_name(self.lesson, *place) for place in changed)
            log.say(
                f"{name_of(self.lesson)}: each step changes {', '.join(names)}, which a resumed run does not restore; "
                "to save arrays, define state(device) (docs/training.md)"
            )
        self.first = now


def _owners(lesson: ModuleType) -> list[Any]:
    """A lesson's module, its classes and its functions, also decorated ones and methods."""
    classes = [v for v in vars(lesson).values() if isinstance(v, type) and v.__module__ == lesson.__name__]
    found = [v for owner in (lesson, *classes) for v in vars(owner).values() if isinstance(v, FunctionType)]
    found = [function for function in found if str(function.__module__).split(".")[0] not in LIBRARIES]
    return [lesson, *classes, *found, *(inspect.unwrap(f) for f in found if hasattr(f, "__wrapped__"))]


def _cells(function: FunctionType) -> list[Any]:
    """The variables of a function's closure that hold values."""
    cells = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            if _is_value(cell.cell_contents):
                cells.append(cell)
    return cells


def _is_value(value: Any) -> bool:
    """Whether this is no module, class, function, property or the like."""
    return not (isinstance(value, (ModuleType, type, BuiltinFunctionType)) or hasattr(type(value), "__get__"))


def _name(lesson: ModuleType, i: int, kind: str, name: Any) -> str:
    """The name of a place in `kept`: a variable of the module, or the function that keeps the value."""
    owner = _owners(lesson)[i]
    if owner is lesson:
        return str(name)
    return owner.__qualname__ if kind == "cell" or name in DEFAULTS else f"{owner.__qualname__}.{name}"


def _checksum(value: Any, seen: set[int]) -> int:
    """A number that differs, very likely, if anything that a value holds differs."""
    if id(value) in seen or isinstance(value, (ModuleType, type)):
        return 0
    seen.add(id(value))
    if isinstance(value, NDArray):
        value = value.asnumpy()
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    if isinstance(value, (int, float, str, bytes, type(None))):
        return zlib.crc32(repr(value).encode())
    parts: list[Any]
    if isinstance(value, FunctionType):
        parts = [cell.cell_contents for cell in _cells(value)]
    elif isinstance(value, dict):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = [*value]
    elif isinstance(value, np.random.Generator):
        parts = [value.bit_generator.state]
    else:
        parts = [getattr(value, "__dict__", None) or repr(value)]
    return hash(tuple(_checksum(part, seen) for part in parts))
