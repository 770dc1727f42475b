"""Restores names that programs from 2016 to 2022 use but that Python and its packages have removed.

A name that still exists is left as it is. All changes affect only this process.
"""

from __future__ import annotations

import collections
import collections.abc
import errno
import inspect
import math
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

BOOKS = {"gluonbook": "0.8.10", "d2lzh": "1.0.0", "d2l": "0.17.6"}  # packages of "Dive into Deep Learning"

ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")
STANDARD_NAMES: dict[str, dict[str, Any]] = {  # {module: {removed name: a name beside it, or a value}}
    "collections": {name: getattr(collections.abc, name) for name in collections.abc.__all__},
    "configparser": {"SafeConfigParser": "ConfigParser"},
    "fractions": {"gcd": math.gcd},
    "inspect": {"getargspec": lambda function: ArgSpec(*inspect.getfullargspec(function)[:4])},
    "locale": {"format": "format_string"},
    "os": {"errno": errno},
    "platform": {"linux_distribution": lambda *_, **__: ("", "", "")},
    "time": {"clock": "perf_counter"},
    "unittest": {
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
    """Add names to a module. names: {name, or path such as "TestCase.assert_": value, or the name of one beside it}."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hasattr may warn that a name is deprecated
        for path, value in names.items():
            *owners, name = path.split(".")
            owner = module
            for part in owners:
                owner = getattr(owner, part)
            if not hasattr(owner, name):
                setattr(owner, name, getattr(owner, value) if isinstance(value, str) else value)


class Missing:
    """Raises an error of one line for a missing package. This finder is last on sys.meta_path."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name in BOOKS:
            pip = f"pip install 'gluon_mgpu[old-books]' && pip install --no-deps {name}=={BOOKS[name]}"
            text = f"{name} is not installed: run `make old-books`, or `{pip}`"
        elif name == "pkg_resources":
            text = "pkg_resources is not installed: run `pip install 'setuptools<81'`"
        else:
            return
        raise one_line(ModuleNotFoundError(text, name=name))


def one_line(error: BaseException) -> Any:
    """Make Python print this error as one line if the program does not catch it. Returns the error."""

    def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            print(f"error: {error}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, value, traceback)

    sys.excepthook = show
    return error
