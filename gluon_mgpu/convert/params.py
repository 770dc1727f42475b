"""Reads the arrays of a .params file, which nd.save writes. MXNet's own reader crashes if the file is damaged.

A file is a list of arrays and a list of their names.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

LIST = 0x112  # the first word of a file
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA  # of an array; before V1, its number of axes is the first word
TYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")


def load_params(path: str | Path) -> dict[str, np.ndarray]:
    """Returns the arrays by name. Raises ValueError if the file is damaged or its arrays are sparse or have no names,
    and OSError if it cannot be read."""
    with open(path, "rb") as file:
        if _words(file, "<QQ")[0] != LIST:
            raise ValueError("its header is wrong")
        arrays = [_array(file) for _ in range(_words(file, "<Q")[0])]
        names = [_take(file, _words(file, "<Q")[0]).decode("utf-8") for _ in range(_words(file, "<Q")[0])]
    if len(names) != len(arrays) or len({*names}) != len(names):
        raise ValueError("its arrays have no names; save them with HybridBlock.export")
    return dict(zip(names, arrays))


def _take(file: BinaryIO, size: int) -> bytes:
    """The next bytes."""
    if size > os.fstat(file.fileno()).st_size - file.tell():
        raise ValueError("its end is missing")
    return file.read(size)


def _words(file: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, _take(file, struct.calcsize(form)))


def _array(file: BinaryIO) -> np.ndarray:
    [version] = _words(file, "<I")
    if version in (V2, V3) and _words(file, "<i") != (0,):
        raise ValueError("a sparse array is not supported")
    [rank] = _words(file, "<i") if version in (V1, V2, V3) else (version,)
    if rank == -1 or rank == 0 and version != V3:  # an array without a value
        return np.zeros(0, np.float32)
    if not 0 <= rank <= 32:
        raise ValueError("a number of axes is wrong")
    shape = _words(file, f"<{rank}{'q' if version in (V1, V2, V3) else 'I'}")
    *_, kind = _words(file, "<iii")  # the device's type and number, and the type of the numbers
    if min(shape, default=0) < 0 or not 0 <= kind < len(TYPES):
        raise ValueError("a shape or a type is wrong")
    dtype = np.dtype(TYPES[kind])
    return np.frombuffer(_take(file, math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
