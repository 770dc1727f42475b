"""Lets current versions of NumPy treat arrays as the versions of 2016 to 2022 did, and convert MXNet's arrays."""

from __future__ import annotations

import ctypes
import functools
import warnings
from types import ModuleType
from typing import Any

WORDS = 50  # of a class's struct in C, which has more
IMMUTABLE = 1 << 8  # Python's flag of classes whose attributes cannot be set


def convert_single_elements(np: ModuleType) -> None:
    """Let float(a), int(a), math.sqrt(a), "%f" % a and b[0] = a work again for an array with one element. NumPy 2.4 and
    later refuse this, unless the array has no dimensions."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this was deprecated before it was removed
            float(np.zeros(1))
        return
    except TypeError:
        pass

    def restored(kind: type) -> Any:
        refuse = getattr(np.ndarray, f"__{kind.__name__}__")

        def convert(self: Any) -> Any:
            return kind(self.item()) if self.size == 1 else refuse(self)

        return convert

    # Find the word of a class in which Python keeps the flags: the only one that has their value in all these classes.
    types = (np.ndarray, np.generic, type, int, dict, Exception, type("Class", (), {}))
    words = [(ctypes.c_ulong * WORDS).from_address(id(kind)) for kind in types]
    places = [i for i in range(WORDS) if all(w[i] == kind.__flags__ for w, kind in zip(words, types))]
    if len(places) != 1:
        return
    words[0][places[0]] &= ~IMMUTABLE
    try:
        for kind in (float, int, complex):
            setattr(np.ndarray, f"__{kind.__name__}__", restored(kind))
    finally:
        words[0][places[0]] |= IMMUTABLE


def accept_ragged(np: ModuleType) -> None:
    """Let np.array and others make an array of objects of rows that have different lengths, as before NumPy 1.24, and
    let np.array(copy=False) copy where it must, as before NumPy 2."""

    def replacement(original: Any) -> Any:
        @functools.wraps(original)
        def convert(value: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
            if options.get("copy") is False and original.__name__ == "array" and hasattr(np, "trapezoid"):
                options["copy"] = None
            try:
                return original(value, dtype, *args, **options)
            except ValueError as error:
                if dtype is None and "inhomogeneous" in str(error):
                    return original(value, object, *args, **options)
                raise

        return convert

    for name in ("array", "asarray", "asanyarray"):  # np.save calls np.asanyarray
        setattr(np, name, replacement(getattr(np, name)))


def add_conversion(mx: ModuleType) -> None:
    """Let NumPy convert MXNet's arrays to its own. Otherwise, it takes them for sequences of objects, which it, or a
    current Matplotlib, refuses. Their dtype is a class, from which NumPy 2.4 and later make no np.dtype."""
    import numpy as np

    mx.nd.NDArray.__array__ = lambda self, dtype=None, copy=None: np.asarray(self.asnumpy(), dtype)
    mx.nd.NDArray.__numpy_dtype__ = property(lambda self: np.dtype(self.dtype))
