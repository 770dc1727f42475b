"""Says what to do about an error that ends an old program, if that is known."""

from __future__ import annotations

import re
import sys
from types import TracebackType

from gluon_mgpu.old import packages
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error

VERSIONED = "mxnet|numpy|pandas|scipy|matplotlib|PIL"  # modules whose version depends on `--here`


def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None, *, here: bool) -> None:
    """Print an error as Python does, and then what to do: this is `sys.excepthook`. here: the program runs in the
    current environment, with `--here`. This package's own errors, and syntax of Python 2, are one line."""
    cause = error
    while cause.__context__:  # MXNet hides which module it could not import
        cause = cause.__context__
    advice = advice_on(f"{cause}: {cause.text}" if isinstance(cause, SyntaxError) else str(cause), here)
    if isinstance(error, Error):
        log.error("; ".join(filter(None, [str(error), advice])))
    elif isinstance(error, SyntaxError) and advice:
        log.error(f"{error.filename}, line {error.lineno}: {advice.replace('FILE.py', str(error.filename))}")
    else:
        sys.__excepthook__(kind, error, traceback)
        if advice:
            log.say(advice)


def advice_on(message: str, here: bool = False) -> str:
    """What to do about the message of an error; empty if unknown. here: see `explain`."""
    if any(re.match(pattern, message) for pattern in packages.PYTHON_2):
        return "this is written for Python 2: convert it with 2to3 (`gluon-mgpu run -m lib2to3 -w FILE.py`)"
    if packages.cuda.DRIVER in message and not here:
        return "without a GPU, use MXNet for CPUs: `gluon-mgpu run --cpu ...`"
    requirement = next((edition for pattern, edition in packages.EDITIONS if re.search(pattern, message)), None)
    if requirement:
        return f"the program is for another edition of the book: `gluon-mgpu run --with {requirement} ...`"
    if re.match(rf"(module|No module named) '({VERSIONED})\b", message):
        if here:
            return "if the program is for MXNet 1.9.1 and packages of its time, omit --here"
        return "if the program is for newer packages, use those of the current environment: `gluon-mgpu run --here ...`"
    missing = re.search(r"No module named '(\w+)", message)
    if missing is None:
        return ""
    name = missing[1]
    requirement = packages.REQUIREMENTS.get(name, name)
    return f"if {name} is a package, add it to the environment: `gluon-mgpu run --with {requirement} ...`"
