"""Lets current versions of NumPy have the names, and treat arrays, as the versions of 2016 to 2022 did, and convert
MXNet's arrays."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import warnings
from types import ModuleType
from typing import Any

from gluon_mgpu.old.names import restore

WORDS = 50  # of a class's struct in C, which has more
IMMUTABLE = 1 << 8  # Python's flag of classes whose attributes cannot be set

EXCEPTIONS = ("VisibleDeprecationWarning", "ComplexWarning", "RankWarning", "AxisError", "TooHardError")
ALIASES = """
    float_=float64 complex_=complex128 unicode_=str_ string_=bytes_ bool8=bool_ int0=intp uint0=uintp object0=object_
    str0=str_ bytes0=bytes_ void0=void cfloat=complex128 singlecomplex=complex64 longfloat=longdouble
    longcomplex=clongdouble clongfloat=clongdouble cumproduct=cumprod mat=asmatrix row_stack=vstack rank=ndim
"""


def add_to_numpy(np: ModuleType) -> None:
    """Restore what NumPy 1.20 to 2.4 removed."""
    from gluon_mgpu.compat import numpy_names

    moved = getattr(np, "exceptions", None)
    kinds = {"int": "bhilq", "uint": "BHILQ", "float": "efdg", "complex": "FDG", "others": "?OSUV"}
    names = {
        **numpy_names.OF_MXNET,
        **{name: getattr(moved, name) for name in EXCEPTIONS if hasattr(moved, name)},
        **{kind.__name__: kind for kind in (bool, int, float, complex, object, str)},
        **dict(pair.split("=") for pair in ALIASES.split()),
        **{"long": int, "unicode": str, "Infinity": np.inf, "infty": np.inf, "math": math, "warnings": warnings},
        "asscalar": lambda a: a.item(),
        "asfarray": lambda a, dtype=np.float64: np.asarray(a, dtype),
        "find_common_type": lambda arrays, scalars: np.result_type(*arrays, *scalars),
        "sctypes": {kind: [np.dtype(code).type for code in codes] for kind, codes in kinds.items()},
        "lib.pad": np.pad,
    }
    if hasattr(np, "trapezoid"):  # NumPy 2
        np.set_printoptions(legacy="1.25")  # 2 instead of np.int64(2), because MXNet's library parses printed numbers
        _write_float32_as_json(np)
    restore(np, names)
    _restore_methods(np)
    _accept_ragged(np)
    _read_bytes_from_strings(np)


def _restore_methods(np: ModuleType) -> None:
    """Restore methods of arrays. Let float(a), int(a), math.sqrt(a), "%f" % a and b[0] = a work again for an array
    with one element. NumPy 2.4 and later refuse this, unless the array has no dimensions."""

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
        methods = {
            "tostring": lambda a, order="C": a.tobytes(order),
            "ptp": lambda a, axis=None: a.max(axis) - a.min(axis),
            "newbyteorder": lambda a, order="S": a.view(a.dtype.newbyteorder(order)),
        }
        restore(np.ndarray, methods)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this was deprecated before it was removed
            float(np.zeros(1))
    except TypeError:
        for kind in (float, int, complex):
            setattr(np.ndarray, f"__{kind.__name__}__", restored(kind))
    finally:
        words[0][places[0]] |= IMMUTABLE


def _accept_ragged(np: ModuleType) -> None:
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


def _write_float32_as_json(np: ModuleType) -> None:
    """Since NumPy 2, 0.0 + np.float32(1) is an np.float32, which json refuses, and not an np.float64, a float."""
    encoder: Any = json.JSONEncoder
    refuse = encoder.default
    encoder.default = lambda self, o: float(o) if isinstance(o, np.float32) else refuse(self, o)


def _read_bytes_from_strings(np: ModuleType) -> None:
    """Restore the binary mode of np.fromstring."""
    from_text = np.fromstring

    def fromstring(string: Any, dtype: Any = float, count: int = -1, sep: str = "") -> Any:
        if sep:
            return from_text(string, dtype, count, sep=sep)
        return np.frombuffer(string, dtype, count).copy()

    np.fromstring = fromstring  # type: ignore[attr-defined]
