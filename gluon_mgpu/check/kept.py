"""What a file keeps from step to step outside its parameters: in variables, objects, and closures of its functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from gluon_mgpu.check.driver import Arrays

Path = tuple[Any, ...]  # the variable, and the keys, indices and attributes that follow


def kept(module: ModuleType, devices: Sequence[Any], **more: Any) -> list[Arrays]:
    """Copies of the numbers and arrays that a module's variables lead to, for each device, by the names of the first
    device's. more: other objects that lead to some.

    What is on no device is the same for all. What is on another device than the first is known by each name that the
    first device's could have, with another key or index: in `velocities[1][0]`, either may be the device.
    """
    own = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    names, found = [str(device) for device in devices], [Arrays() for _ in devices]
    for path, value in _walk({**more, **own}, (), module.__name__, set()):
        device = str(getattr(value, "context", "") or getattr(value, "device", ""))
        array = _copied(value)
        if array is None:
            continue
        for rank, arrays in enumerate(found):
            if rank and device == names[rank]:
                for other in _on_first(path, rank, names):
                    arrays[_name(other)] = array
            if device not in names or device == names[rank]:
                arrays.setdefault(_name(path), array)
    return [{**found[0], **arrays} for arrays in found]  # what only the first device has is for all


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
    value = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
    for key, part in [*value.items()] if isinstance(value, Mapping) else ():
        yield from _walk(part, (*path, _plain(key)), module, seen)


def _plain(key: Any) -> Any:
    """A key with names instead of devices."""
    return tuple(map(_plain, key)) if isinstance(key, tuple) else key if isinstance(key, (int, str)) else str(key)


def _is_array(value: Any) -> bool:
    is_array = hasattr(value, "dtype") and (hasattr(value, "asnumpy") or hasattr(value, "__array__"))
    return is_array and not isinstance(value, type)


def _is_own(value: Any, module: str) -> bool:
    """Whether this is a class of the file, an object of one, or one of Gluon's blocks."""
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__ == module or hasattr(value, "_children")


def _copied(value: Any) -> np.ndarray | None:
    """In float64; None if it does not convert to numbers, such as text or a key of jax.random."""
    if hasattr(value, "asnumpy"):
        return value.asnumpy().astype(np.float64)
    try:
        array = np.array(value)
        return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    except Exception:
        return None


def _on_first(path: Path, rank: int, devices: Sequence[str]) -> Iterator[Path]:
    """Where the first device may have what a device has here."""
    first = {rank: 0, devices[rank]: devices[0]}
    for i, key in enumerate(path):
        replaced = tuple(first.get(part, part) for part in key) if isinstance(key, tuple) else first.get(key, key)
        if replaced != key:
            yield (*path[:i], replaced, *path[i + 1 :])


def _name(path: Path) -> str:
    first, *others = path
    return str(first) + "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in others)
