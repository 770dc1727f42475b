"""Says what to do about an error that ends an old program, if that is known."""

from __future__ import annotations

import re
import sys
from types import TracebackType

from gluon_mgpu.old import packages
from gluon_mgpu.support import log

VERSIONED = "mxnet|numpy|pandas|scipy|matplotlib|PIL"  # modules whose version depends on `--here`


def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None, *, here: bool) -> None:
    """Print an error as Python does, and then what to do: this is `sys.excepthook`. here: the program runs in the
    current environment, with `--here`."""
    sys.__excepthook__(kind, error, traceback)
    while error.__context__:  # MXNet hides which module it could not import
        error = error.__context__
    advice = advice_on(f"{error}: {error.text}" if isinstance(error, SyntaxError) else str(error), here)
    if advice:
        log.say(advice)


def advice_on(message: str, here: bool = False) -> str:
    """What to do about the message of an error; empty if unknown. here: see `explain`."""
    if any(re.match(pattern, message) for pattern in packages.PYTHON_2):
        return "this is written for Python 2: convert it with 2to3 (`gluon-mgpu run -m lib2to3 -w FILE.py`)"
    requirement = next((edition for pattern, edition in packages.EDITIONS if re.search(pattern, message)), None)
    if requirement:
        return f"the program is for another edition of the book: `gluon-mgpu run --with {requirement} ...`"
    if re.match(rf"module '({VERSIONED})(\.\w+)*' has no attribute", message):
        if here:
            return "if the program is for MXNet 1.9.1 and packages of its time, omit --here"
        return "if the program is for newer packages, use those of the current environment: `gluon-mgpu run --here ...`"
    missing = re.search(r"No module named '([\w.]+)'", message)
    if missing is None:
        return ""
    name = missing[1].partition(".")[0]
    requirement = packages.REQUIREMENTS.get(missing[1], packages.REQUIREMENTS.get(name, name))
    return f"if {name} is a package, add it to the environment: `gluon-mgpu run --with {requirement} ...`"
