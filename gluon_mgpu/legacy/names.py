"""Restores names and modules that programs from 2016 to 2022 use but that Python and its packages have removed.

A name that still exists is left as it is. All changes affect only this process.
"""

from __future__ import annotations

import collections
import collections.abc
import errno
import importlib.util
import inspect
import math
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

STANDARD = Path(collections.__file__).parents[1]  # the standard library's folder
# Modules that Python has removed: {name: file that replaces the module}.
MODULES = {
    "pipes": STANDARD / "shlex.py",  # contains the `quote` for which programs imported pipes
    "xml.etree.cElementTree": STANDARD / "xml/etree/ElementTree.py",
}
BOOKS = {"gluonbook": "0.8.10", "d2lzh": "1.0.0", "d2l": "0.17.6"}  # packages of "Dive into Deep Learning"

# Names of MXNet 1.9.1 that MXNet 2 lacks.
REMOVED = ("executor_manager", "mod", "module", "mon", "monitor", "rnn", "th", "torch")

ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")
STANDARD_NAMES: dict[str, dict[str, Any]] = {  # {module: {removed name: a name beside it, or a value}}
    "base64": {"encodestring": "encodebytes", "decodestring": "decodebytes"},
    "collections": {name: getattr(collections.abc, name) for name in collections.abc.__all__},
    "configparser": {"SafeConfigParser": "ConfigParser"},
    "fractions": {"gcd": math.gcd},
    "inspect": {"getargspec": lambda function: ArgSpec(*inspect.getfullargspec(function)[:4])},
    "locale": {"format": "format_string"},
    "os": {"errno": errno},
    "platform": {"linux_distribution": lambda *_, **__: ("", "", "")},
    "threading": {"Thread.isAlive": "is_alive"},
    "time": {"clock": "perf_counter"},
    "unittest": {
        "_TextTestResult": "TextTestResult",
        "runner._TextTestResult": "TextTestResult",
        "TestCase.assertEquals": "assertEqual",
        "TestCase.assertNotEquals": "assertNotEqual",
        "TestCase.assertAlmostEquals": "assertAlmostEqual",
        "TestCase.assertNotAlmostEquals": "assertNotAlmostEqual",
        "TestCase.assertRegexpMatches": "assertRegex",
        "TestCase.assertRaisesRegexp": "assertRaisesRegex",
        "TestCase.assert_": "assertTrue",
    },
}


def restore(module: Any, names: dict[str, Any]) -> None:
    """Add names to a module. names: {name, or path such as "Thread.isAlive": value, or the name of one beside it}."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hasattr may warn that a name is deprecated
        for path, value in names.items():
            *owners, name = path.split(".")
            owner = module
            for part in owners:
                owner = getattr(owner, part)
            if not hasattr(owner, name):
                setattr(owner, name, getattr(owner, value) if isinstance(value, str) else value)


class Modules:
    """Finds MODULES, and raises an error of one line for others. This finder is last on sys.meta_path, so
    that installed modules take precedence."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        text = ""
        if name in BOOKS:
            pip = f"pip install 'gluon_mgpu[old-books]' && pip install --no-deps {name}=={BOOKS[name]}"
            text = f"{name} is not installed: run `make old-books`, or `{pip}`"
        elif name == "pkg_resources":
            text = "pkg_resources is not installed: run `pip install 'setuptools<81'`"
        elif name.startswith("mxnet.") and name[6:] in REMOVED:
            text = _not_in_mxnet_2(name)
        if text:
            raise one_line(ModuleNotFoundError(text, name=name))
        return importlib.util.spec_from_file_location(name, MODULES[name]) if name in MODULES else None


def attribute_of_mxnet_2(name: str) -> Any:
    """What `mxnet.__getattr__` does: raise AttributeError."""
    if name in REMOVED:
        raise one_line(AttributeError(_not_in_mxnet_2(f"mx.{name}")))
    raise AttributeError(f"module 'mxnet' has no attribute {name!r}")


def _not_in_mxnet_2(name: str) -> str:
    return f"{name} is not in MXNet 2: run this program in an environment with mxnet==1.9.1"


def one_line(error: BaseException) -> Any:
    """Make Python print this error as one line if the program does not catch it. Returns the error."""

    def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            print(f"error: {error}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, value, traceback)

    sys.excepthook = show
    return error
