"""The names that MXNet 1.9.1 reads from NumPy and that NumPy has dropped: MXNet finds them, and nobody else does.

Most are read once, while MXNet is imported: they stand on the numpy module for as long as that takes. Two are read when
something is called, by three of MXNet's modules: only these get a copy of the numpy module that has them. So `np.bool`
is NumPy's own, or not there, and a library that asks `hasattr(np, "trapz")` gets the answer of the NumPy it runs on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import numpy as np


def _financial(name: str) -> Callable[..., NoReturn]:
    def removed(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"numpy.{name} was removed from NumPy in 1.20 (NEP 32): numpy_financial has it")

    return removed


# Each as it was. MXNet files its own functions under NumPy's, so an old name for one must be another object: a partial.
WHILE_IMPORTED = {
    "bool": bool,  # dropped in 1.24; since 2.0 NumPy has its own, which MXNet can use. The others went in 2.0 or 2.4
    "PZERO": 0.0,
    "NZERO": -0.0,
    "PINF": np.inf,
    "NINF": -np.inf,
    "Inf": np.inf,
    "NaN": np.nan,
    "NAN": np.nan,
    "alltrue": functools.partial(np.all),
    "sometrue": functools.partial(np.any),
    "product": functools.partial(np.prod),
    "round_": functools.partial(np.around),
    "msort": lambda a: np.sort(a, axis=0),
    "in1d": lambda ar1, ar2, *args, **kwargs: np.isin(np.ravel(ar1), ar2, *args, **kwargs),
    "trapz": lambda *args, **kwargs: vars(np)["trapezoid"](*args, **kwargs),
    **{name: _financial(name) for name in ("mirr", "npv", "pmt", "ppmt", "pv", "rate")},
}
WHEN_CALLED = {"Inf": np.inf, "compat": types.SimpleNamespace(basestring=str)}
CALLED = (  # the modules that read these, and what they call NumPy
    ("mxnet.gluon.contrib.estimator.event_handler", "np"),
    ("mxnet.ndarray.numpy._op", "_np"),
    ("mxnet.symbol.numpy._symbol", "_np"),
)


def lend() -> None:
    """From now on `import mxnet` finds the names that this NumPy lacks. Call it before the first one."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds mxnet where Python does, and puts the names in place around its import."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == "mxnet" else None
        if spec is not None and spec.loader is not None:
            execute = functools.partial(_execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]  # of this one loader
        return spec


def _execute(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
    with _standing(_missing(WHILE_IMPORTED)):
        exec_module(module)
    later = _missing(WHEN_CALLED)
    if later:
        own = types.ModuleType("numpy")
        vars(own).update({**vars(np), **later})
        for name, variable in CALLED:
            setattr(sys.modules[name], variable, own)


def _missing(names: Mapping[str, Any]) -> dict[str, Any]:
    """Those that this NumPy has not, under its own name or as one that it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: value for name, value in names.items() if not hasattr(np, name)}


@contextlib.contextmanager
def _standing(names: dict[str, Any]) -> Iterator[None]:
    vars(np).update(names)
    try:
        yield
    finally:
        for name in names:
            delattr(np, name)
