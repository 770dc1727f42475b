"""Restores names that Python removed from 2016 to 2022, for the programs that use them.

A name that still exists is left as it is. All changes affect only this process.
"""

from __future__ import annotations

import collections
import collections.abc
import errno
import inspect
import math
from typing import Any

ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")
# {module: {name removed until Python 3.11: a name beside it, or a value}}
STANDARD_NAMES: dict[str, dict[str, Any]] = {
    "collections": {name: getattr(collections.abc, name) for name in collections.abc.__all__},
    "fractions": {"gcd": math.gcd},
    "inspect": {"getargspec": lambda function: ArgSpec(*inspect.getfullargspec(function)[:4])},
    "os": {"errno": errno},
    "platform": {"linux_distribution": lambda *_, **__: ("", "", "")},
    "time": {"clock": "perf_counter"},
}


def restore(module: Any, names: dict[str, Any]) -> None:
    """Add names to a module. names: {name: value, or the name of one beside it}."""
    for name, value in names.items():
        if name not in vars(module):
            setattr(module, name, getattr(module, value) if isinstance(value, str) else value)
