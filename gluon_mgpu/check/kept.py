"""What a file keeps from step to step outside its parameters: in variables, objects, and closures of its functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

DIFFERS = (
    "what the file keeps here is not the same after the steps on several devices as after those on one; update it once "
    "per step, with what all devices have"
)
Path = tuple[Any, ...]  # the variable, and the keys, indices and attributes that follow
Values = dict[Path, tuple[np.ndarray, str]]  # with the name of the device that a value is on


def kept(module: ModuleType, **more: Any) -> Values:
    """Copies of the numbers and arrays that a module's variables lead to. more: other objects that lead to some."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return {path: _copied(value) for path, value in _walk({**more, **own}, (), module.__name__, set())}


def _walk(value: Any, path: Path, module: str, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, bool) or id(value) in seen and not isinstance(value, (int, float)):
        return
    seen.add(id(value))
    if _is_array(value) or isinstance(value, (int, float, complex)):
        yield path, value
        return
    if isinstance(value, FunctionType) and value.__module__ == module:
        value = dict(inspect.getclosurevars(inspect.unwrap(value)).nonlocals)
    elif not isinstance(value, (Mapping, list, tuple)) and _is_own(value, module):
        value = {n: a for n, a in getattr(value, "__dict__", {}).items() if not n.startswith("__")}
    parts = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    )
    for key, part in list(parts):
        yield from _walk(part, (*path, _plain(key)), module, seen)


def _plain(key: Any) -> Any:
    """A key with names instead of devices."""
    return tuple(map(_plain, key)) if isinstance(key, tuple) else key if isinstance(key, (int, str)) else str(key)


def _is_array(value: Any) -> bool:
    return (
        not isinstance(value, type)
        and hasattr(value, "dtype")
        and (hasattr(value, "asnumpy") or hasattr(value, "__array__"))
    )


def _is_own(value: Any, module: str) -> bool:
    """Whether a class of the file, or one that it has as a base, keeps its values here: an object, a class or a
    network."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__ == module or hasattr(value, "_children")


def _copied(value: Any) -> tuple[np.ndarray, str]:
    """In float64, and the device."""
    device = str(getattr(value, "context", "") or getattr(value, "device", ""))
    array = value.asnumpy() if hasattr(value, "asnumpy") else np.array(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64), device


def differences(several: Values, one: Values, devices: Sequence[str]) -> list[str]:
    """The names of what differs from what is kept on one device, if both have the same shape.

    devices: of the steps on several. What another than the first keeps is compared with what the first one keeps.
    """
    names = list[str]()
    for path, (value, device) in several.items():
        rank = devices.index(device) if device in devices else 0
        expected = [one[p][0] for p in (path, *_on_first(path, rank, devices)) if p in one]
        if expected and expected[0].shape == value.shape:
            error, size = (float(np.linalg.norm(a)) for a in (value - expected[0], expected[0]))
            if not error <= 1e-4 * size + 1e-12:
                names.append(_name(path))
    return names


def _on_first(path: Path, rank: int, devices: Sequence[str]) -> Iterator[Path]:
    """Where a value of a device may be on the first: at another key or index."""
    first = {rank: 0, devices[rank]: devices[0]}
    for i, key in enumerate(path):
        replaced = tuple(first.get(part, part) for part in key) if isinstance(key, tuple) else first.get(key, key)
        if replaced != key:
            yield (*path[:i], replaced, *path[i + 1 :])


def _name(path: Path) -> str:
    first, *others = path
    return str(first) + "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in others)
