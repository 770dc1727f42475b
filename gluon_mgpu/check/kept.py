"""What a file keeps from step to step outside its parameters: in variables, objects, and closures of its functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gluon_mgpu.check.driver import Arrays
from gluon_mgpu.support.reachable import Parts, Path, attributes_of, name_of, parts_of, reachable


def kept(module: ModuleType, devices: Sequence[Any], **more: Any) -> list[Arrays]:
    """Copies of the numbers and arrays that a module's variables lead to, for each device, by the names of the first
    device's. more: other objects that lead to some.

    What is on no device is the same for all. What is on another device than the first is known by each name that the
    first device's could have, with another key or index: in `velocities[1][0]`, either may be the device.
    """
    variables = {**more, **{name: value for name, value in vars(module).items() if not name.startswith("__")}}
    names, found = [str(device) for device in devices], [Arrays() for _ in devices]
    for path, value in reachable((((name,), value) for name, value in variables.items()), _parts):
        device = str(getattr(value, "context", "") or getattr(value, "device", ""))
        array = _copied(value)
        if array is None:
            continue
        plain = tuple(map(_plain, path))
        for rank, arrays in enumerate(found):
            if rank and device == names[rank]:
                for other in _on_first(plain, rank, names):
                    arrays[name_of(other)] = array
            if device not in names or device == names[rank]:
                arrays.setdefault(name_of(plain), array)
    return [{**found[0], **arrays} for arrays in found]  # what only the first device has is for all


def _parts(value: Any) -> Parts:
    """What is in a value: as usual, and the attributes of Gluon's blocks."""
    return attributes_of(value) if hasattr(value, "_children") else parts_of(value, libraries=False)


def _plain(key: Any) -> Any:
    """A key with names instead of devices."""
    return tuple(map(_plain, key)) if isinstance(key, tuple) else key if isinstance(key, (int, str)) else str(key)


def _copied(value: Any) -> np.ndarray | None:
    """A number or an array in float64; None for anything else, such as text or a key of jax.random."""
    is_array = hasattr(value, "dtype") and (hasattr(value, "asnumpy") or hasattr(value, "__array__"))
    if isinstance(value, (bool, type)) or not (is_array or isinstance(value, (int, float, complex))):
        return None
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
