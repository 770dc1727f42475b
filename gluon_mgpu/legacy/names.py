"""Restores names and modules that programs from 2016 to 2022 use but that Python and NumPy have removed.

Only np.fromstring, np.array, np.asarray and np.asanyarray are replaced; any other name that still exists is left as it
is. All changes affect only this process.
"""

from __future__ import annotations

import collections
import collections.abc
import ctypes
import errno
import gc
import importlib.util
import json
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from gluon_mgpu.legacy import arrays

STANDARD = Path(collections.__file__).parents[1]  # the standard library's folder
# Modules that Python has removed: {name: file that replaces the module}.
MODULES = {
    "imp": Path(__file__).with_name("old_imp.py"),
    "pipes": STANDARD / "shlex.py",  # contains the `quote` for which programs imported pipes
    "xml.etree.cElementTree": STANDARD / "xml/etree/ElementTree.py",
}
# Packages of "Dive into Deep Learning": {module: what to install with `pip install --no-deps`}.
BOOKS = {"gluonbook": "gluonbook==0.8.10", "d2lzh": "d2lzh==1.0.0", "d2l": "d2l==0.17.6"}

# Names of MXNet 1.9.1 that MXNet 2 lacks.
REMOVED = ("executor_manager", "mod", "module", "mon", "monitor", "rnn", "th", "torch")
USE_191 = "run this program in an environment with mxnet==1.9.1"


class MissingModule(ModuleNotFoundError):
    """A package in BOOKS is not installed, or MXNet 2 lacks a module. The message is one line."""


class RemovedName(AttributeError):
    """A name in REMOVED was used with MXNet 2. The message is one line."""


class Modules:
    """Finds MODULES, and raises MissingModule for BOOKS and REMOVED. This finder is last on sys.meta_path, so that
    installed modules take precedence."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in BOOKS:
            sys.excepthook = _show
            pip = f"pip install 'gluon_mgpu[old-books]' && pip install --no-deps {BOOKS[name]}"
            raise MissingModule(f"{name} is not installed: run `make old-books`, or `{pip}`", name=name)
        if name.startswith("mxnet.") and name[6:] in REMOVED:
            sys.excepthook = _show
            raise MissingModule(f"{name} is not in MXNet 2: {USE_191}", name=name)
        return importlib.util.spec_from_file_location(name, MODULES[name]) if name in MODULES else None


def _refuse(name: str) -> None:
    """Raise RemovedName for a name in REMOVED, AttributeError for any other."""
    if name not in REMOVED:
        raise AttributeError(f"module 'mxnet' has no attribute {name!r}")
    sys.excepthook = _show
    raise RemovedName(f"mx.{name} is not in MXNet 2: {USE_191}")


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print a MissingModule or RemovedName as one line, and any other error as Python does."""
    if isinstance(error, (MissingModule, RemovedName)):
        print(f"error: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def _collections(module: ModuleType) -> None:
    for name in collections.abc.__all__:
        add(module, name, getattr(collections.abc, name))


def _inspect(module: ModuleType) -> None:
    def getargspec(function: Any) -> ArgSpec:
        spec = module.getfullargspec(function)
        return ArgSpec(spec.args, spec.varargs, spec.varkw, spec.defaults)

    add(module, "getargspec", getargspec)


def _base64(module: ModuleType) -> None:
    add(module, "encodestring", module.encodebytes)
    add(module, "decodestring", module.decodebytes)


def _unittest(module: ModuleType) -> None:
    for owner in (module, module.runner):
        add(owner, "_TextTestResult", module.TextTestResult)
    test = module.TestCase
    for old, new in (
        ("assertEquals", "assertEqual"),
        ("assertNotEquals", "assertNotEqual"),
        ("assertAlmostEquals", "assertAlmostEqual"),
        ("assertNotAlmostEquals", "assertNotAlmostEqual"),
        ("assertRegexpMatches", "assertRegex"),
        ("assertRaisesRegexp", "assertRaisesRegex"),
        ("assert_", "assertTrue"),
    ):
        add(test, old, getattr(test, new))


ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")
# {module: what restores the names that Python 3.8 to 3.13 removed from it}
RESTORE: dict[str, Callable[[ModuleType], object]] = {
    "base64": _base64,
    "collections": _collections,
    "configparser": lambda module: add(module, "SafeConfigParser", module.ConfigParser),
    "fractions": lambda module: add(module, "gcd", math.gcd),
    "inspect": _inspect,
    "locale": lambda module: add(module, "format", module.format_string),
    "os": lambda module: add(module, "errno", errno),
    "platform": lambda module: add(module, "linux_distribution", lambda *_, **__: ("", "", "")),
    "threading": lambda module: add(module.Thread, "isAlive", module.Thread.is_alive),
    "time": lambda module: add(module, "clock", module.perf_counter),
    "unittest": _unittest,
}


def add_to_numpy(np: ModuleType) -> None:
    """Restore names that NumPy 1.20 to 2.4 removed, and the binary mode of `fromstring`."""
    from gluon_mgpu.runtime import numpy_names

    aliases = {"bool": bool, "int": int, "float": float, "complex": complex, "object": object, "str": str}
    aliases |= {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_, "string_": np.bytes_}
    functions = {
        "cumproduct": np.cumprod,
        "mat": np.asmatrix,
        "find_common_type": lambda arrays, scalars: np.result_type(*arrays, *scalars),
        "row_stack": np.vstack,
        "rank": np.ndim,
        "asscalar": lambda a: a.item(),
        "asfarray": lambda a, dtype=np.float64: np.asarray(a, dtype),
    }
    moved = ("VisibleDeprecationWarning", "ComplexWarning", "RankWarning", "AxisError", "TooHardError")
    now = getattr(np, "exceptions", None)
    exceptions = {name: getattr(now, name) for name in moved if hasattr(now, name)}
    types = {"bool8": np.bool_, "int0": np.intp, "uint0": np.uintp, "object0": np.object_, "str0": np.str_}
    types |= {"bytes0": np.bytes_, "void0": np.void, "cfloat": np.complex128, "singlecomplex": np.complex64}
    types |= {"longfloat": np.longdouble, "longcomplex": np.clongdouble, "clongfloat": np.clongdouble}
    others = {"Infinity": np.inf, "infty": np.inf, "long": int, "unicode": str, "math": math, "warnings": warnings}
    kinds = {"int": "bhilq", "uint": "BHILQ", "float": "efdg", "complex": "FDG", "others": "?OSUV"}
    others["sctypes"] = {kind: [np.dtype(code).type for code in codes] for kind, codes in kinds.items()}
    if hasattr(np, "trapezoid"):  # NumPy 2 prints np.int64(2) instead of 2, and MXNet's library parses printed numbers
        np.set_printoptions(legacy="1.25")
    for name, value in (numpy_names.REMOVED | aliases | types | exceptions | functions | others).items():
        add(np, name, value)
    add(np.lib, "pad", np.pad)
    _add_array_methods(np)
    arrays.convert_single_elements(np)
    arrays.accept_ragged(np)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode was deprecated before it was removed
            np.fromstring(b"", np.uint8)
    except ValueError:
        _read_bytes_from_strings(np)


def _read_bytes_from_strings(np: ModuleType) -> None:
    """Restore the binary mode of np.fromstring."""
    from_text = np.fromstring

    def fromstring(string: Any, dtype: Any = float, count: int = -1, sep: str = "") -> Any:
        if sep:
            return from_text(string, dtype, count, sep=sep)
        return np.frombuffer(string, dtype, count).copy()

    np.fromstring = fromstring  # type: ignore[attr-defined]


def _add_array_methods(np: ModuleType) -> None:
    """Restore methods of arrays that NumPy 2.0 to 2.3 removed."""
    [attributes] = gc.get_referents(np.ndarray.__dict__)  # setattr does not work for classes written in C
    for name, method in {
        "tostring": lambda a, order="C": a.tobytes(order),
        "ptp": lambda a, axis=None: a.max(axis) - a.min(axis),
        "newbyteorder": lambda a, order="S": a.view(a.dtype.newbyteorder(order)),
    }.items():
        if not hasattr(np.empty(0), name):
            attributes[name] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(np.ndarray))  # makes Python forget that the names were missing


def add_to_ipython(display: ModuleType) -> None:
    """Restore the function of IPython.display that IPython 9 removed."""

    def set_matplotlib_formats(*formats: str, **options: Any) -> None:
        from matplotlib_inline import backend_inline  # imports IPython, so it cannot be imported earlier

        backend_inline.set_matplotlib_formats(*formats, **options)

    add(display, "set_matplotlib_formats", set_matplotlib_formats)


def add_to_mxnet(mx: ModuleType) -> None:
    """Restore a name that earlier versions of MXNet had, split_data for fewer examples than slices, Constant(list), and
    what MXNet and its arrays no longer do with NumPy and Matplotlib."""
    import numpy as np

    add(mx.gluon, "autograd", mx.autograd)
    if mx.__version__ >= "2":
        vars(mx)["__getattr__"] = _refuse
    arrays.add_conversion(mx)
    if hasattr(np, "trapezoid"):
        _keep_sums_in_float64(mx.metric.EvalMetric)
    split = mx.gluon.utils.split_data
    mx.gluon.utils.split_data = lambda data, num_slice, batch_axis=0, even_split=True: split(
        data, num_slice if even_split else min(num_slice, data.shape[batch_axis]), batch_axis, even_split
    )
    mx.init.Constant.dumps = lambda self: json.dumps(["constant", {"value": np.asarray(self.value).tolist()}])


def _keep_sums_in_float64(metric: Any) -> None:
    """Store the sums of a metric as np.float64. Since NumPy 2, 0.0 + np.float32(x) is a float32, but np.float64(0.0) +
    np.float32(x) is still a float64."""
    import numpy as np

    def stored_as(name: str) -> property:
        def set_sum(self: Any, value: Any) -> None:
            vars(self)[name] = np.float64(value) if isinstance(value, (float, np.floating)) else value

        return property(lambda self: getattr(self, name), set_sum)  # raises AttributeError before it is set

    metric.sum_metric, metric.global_sum_metric = stored_as("_sum_metric"), stored_as("_global_sum_metric")


def add(owner: Any, name: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hasattr may warn that a name is deprecated
        if not hasattr(owner, name):
            setattr(owner, name, value)
