"""The names that MXNet 1.9.1 needs and that NumPy has removed.

MXNet uses most of its names only while it is being imported, so the numpy module has them only during that import, and
other code does not see them. Three MXNet modules use two of the names later, so these modules get a copy of the numpy
module that contains both.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# MXNet keeps its own functions in a table whose keys are NumPy's functions, so two names must not share an object.
# Each partial is a new object, and has a docstring, which MXNet 2 reads.
WHILE_IMPORTED = {
    "bool": bool,  # removed in 1.24, defined again in 2.0; the names below were removed in 2.0 or 2.4
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
    "msort": functools.partial(np.sort, axis=0),
    "in1d": functools.partial(lambda ar1, *args, **kwargs: np.isin(np.ravel(ar1), *args, **kwargs)),
    "trapz": functools.partial(lambda *args, **kwargs: vars(np)["trapezoid"](*args, **kwargs)),
    # moved to the package numpy_financial in 1.20
    **{name: object() for name in ("mirr", "npv", "pmt", "ppmt", "pv", "rate")},
}
WHEN_CALLED = {"Inf": np.inf, "compat": types.SimpleNamespace(basestring=str)}
READERS = (  # the modules that use WHEN_CALLED, and the name that each gives to numpy
    ("mxnet.gluon.contrib.estimator.event_handler", "np"),
    ("mxnet.ndarray.numpy._op", "_np"),
    ("mxnet.symbol.numpy._symbol", "_np"),
)


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Give MXNet the names that the installed NumPy lacks. Import mxnet inside the `with` block."""
    names = _missing(WHILE_IMPORTED)
    vars(np).update(names)
    try:
        yield
    finally:
        for name in names:
            delattr(np, name)
    later = _missing(WHEN_CALLED)
    if later:
        copy = types.ModuleType("numpy")
        vars(copy).update({**vars(np), **later})
        for name, variable in READERS:
            setattr(sys.modules[name], variable, copy)


def _missing(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names that the installed NumPy lacks. Deprecated names still exist; reading them only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: value for name, value in names.items() if not hasattr(np, name)}
