"""What the user's objects and functions lead to: nests, attributes, closures, global variables. Needs no framework."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from gluon_mgpu.support.programs import is_users

Path = tuple[Any, ...]  # keys, indices and names of attributes
Parts = Iterable[tuple[Path, Any]]  # what is in an object, and the path from the object to it
LIMIT = 50_000  # objects that are searched
CONTAINERS = {"collections", "functools", "types", "dataclasses"}


def parts_of(value: Any, libraries: bool = True) -> Parts:
    """What is in a nest, an object or a function of the user. libraries: also in objects of other libraries."""
    if isinstance(value, dict):
        yield from (((key,), item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from (((i,), item) for i, item in enumerate(value))
    elif isinstance(value, MethodType):
        yield (), value.__self__
        yield (), value.__func__
    elif isinstance(value, functools.partial):
        yield from (((), part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, FunctionType):
        if is_users(value.__code__.co_filename):
            yield from _closure(value)
            yield (), (value.__defaults__, value.__kwdefaults__)
            yield from _globals(value.__code__, value.__globals__)
        yield (), getattr(value, "__wrapped__", None)
    elif isinstance(value, (type, ModuleType)):
        if _is_of_user(value):
            items = list(vars(value).items())
            yield from (((name,), item) for name, item in items if not isinstance(item, ModuleType))
    elif isinstance(value, (staticmethod, classmethod)):
        yield (), value.__func__
    elif not isinstance(value, BuiltinFunctionType):
        kind = type(value)
        if _is_of_user(kind) or _is_container(kind) or libraries and _is_of_library(kind):
            yield from attributes_of(value)
            yield (), kind


def reachable(start: Parts, parts: Callable[[Any], Parts] = parts_of) -> Iterator[tuple[Path, Any]]:
    """Everything that some values lead to, the nearest first, with the shortest path to it. An object comes once.

    start: values with their paths. parts: returns what is in a value.
    """
    queue, seen = deque(start), dict[int, Any]()  # with the objects, so that no id is used again
    while queue and len(seen) < LIMIT:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        if not isinstance(value, (int, float, complex, str, bytes)):
            seen[id(value)] = value
        yield path, value
        queue += [((*path, *keys), part) for keys, part in parts(value)]


def name_of(path: Path) -> str:
    """A path as it is written in Python, such as `trainer.moments[0]`; keys that are text look like attributes."""
    name = "".join(f".{key}" if isinstance(key, str) else f"[{key!r}]" for key in path)
    return name[1:] if name.startswith(".") else name


def attributes_of(value: Any) -> Parts:
    """The attributes of an object, also those in slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    yield from (((name,), getattr(value, name)) for name in slots)
    yield from (((name,), item) for name, item in list(getattr(value, "__dict__", {}).items()))


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _closure(function: FunctionType) -> Parts:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield (name,), cell.cell_contents
        except ValueError:  # not yet assigned
            continue


def _globals(code: CodeType, variables: dict[str, Any]) -> Parts:
    """The global variables that a function names."""
    yield from (((name,), variables[name]) for name in code.co_names if name in variables)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner, variables)


def _is_of_user(kind: Any) -> bool:
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return is_users(file) if file else name == "__main__"  # in a notebook, __main__ has no file


def _is_container(kind: type) -> bool:
    """Whether this is a class of nests, such as UserDict and SimpleNamespace."""
    return kind.__module__.partition(".")[0] in CONTAINERS


def _is_of_library(kind: type) -> bool:
    """Whether this is a class of a library whose objects may wrap a network."""
    root = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file and root not in ("torch", "numpy", "gluon_mgpu")
