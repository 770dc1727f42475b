"""Restores names and modules that Python and NumPy have removed and that programs from 2016 to 2022 use.

A name that still exists is never replaced. All changes are made in this process only.
"""

from __future__ import annotations

import collections
import collections.abc
import errno
import fractions
import importlib.util
import inspect
import math
import os
import platform
import shlex
import sys
import threading
import time
import types
import unittest
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

OWN = Path(__file__).parent
# Modules that this package provides if they are not installed: {name: file}.
MODULES = {
    **dict.fromkeys(("gluonbook", "d2lzh", "d2l", "d2l.mxnet"), OWN / "book.py"),
    "imp": OWN / "imp.py",
}


class Modules:
    """Finds MODULES. It is last on sys.meta_path, so that installed modules take precedence."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        within: list[str] | None = [] if name == "d2l" else None  # d2l is a package that contains d2l.mxnet
        return importlib.util.spec_from_file_location(name, MODULES[name], submodule_search_locations=within)


def add_to_python() -> None:
    """Restore names that Python 3.8 to 3.13 removed from modules that still exist."""
    for name in collections.abc.__all__:
        _add(collections, name, getattr(collections.abc, name))
    _add(inspect, "getargspec", _getargspec)
    _add(time, "clock", time.perf_counter)
    _add(platform, "linux_distribution", lambda *_, **__: ("", "", ""))
    _add(threading.Thread, "isAlive", threading.Thread.is_alive)
    for old, new in (
        ("assertEquals", "assertEqual"),
        ("assertNotEquals", "assertNotEqual"),
        ("assertAlmostEquals", "assertAlmostEqual"),
        ("assertRegexpMatches", "assertRegex"),
        ("assertRaisesRegexp", "assertRaisesRegex"),
        ("assert_", "assertTrue"),
    ):
        _add(unittest.TestCase, old, getattr(unittest.TestCase, new))
    _add(fractions, "gcd", math.gcd)
    _add(os, "errno", errno)
    if importlib.util.find_spec("pipes") is None:
        sys.modules["pipes"] = types.ModuleType("pipes")
        sys.modules["pipes"].quote = shlex.quote  # type: ignore[attr-defined]


ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")


def _getargspec(function: Any) -> ArgSpec:
    spec = inspect.getfullargspec(function)
    return ArgSpec(spec.args, spec.varargs, spec.varkw, spec.defaults)


def add_to_numpy(np: ModuleType) -> None:
    """Restore names that NumPy 1.20 to 2.4 removed."""
    from gluon_mgpu.runtime import numpy_names

    aliases = {"bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str}
    aliases |= {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_, "string_": np.bytes_}
    functions = {
        "cumproduct": np.cumprod,
        "row_stack": np.vstack,
        "rank": np.ndim,
        "asscalar": lambda a: a.item(),
        "asfarray": lambda a, dtype=np.float64: np.asarray(a, dtype),
    }
    numbers = {"Infinity": np.inf, "infty": np.inf, "long": int, "unicode": str}
    for name, value in {**numpy_names.REMOVED, **aliases, **functions, **numbers}.items():
        _add(np, name, value)


def _add(owner: Any, name: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecated name still exists
        if not hasattr(owner, name):
            setattr(owner, name, value)
