"""Says what to do about an error that ends an old program, if that is known."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from traceback import extract_tb
from types import TracebackType

from gluon_mgpu.compat import cuda
from gluon_mgpu.old import packages, python2
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error

START = ("gluon-mgpu run", "...")
VERSIONED = "mxnet|numpy|pandas|scipy|matplotlib|PIL"  # modules whose version depends on `--here`


def explain(
    kind: type[BaseException],
    error: BaseException,
    traceback: TracebackType | None,
    *,
    here: bool = False,
    start: Sequence[str] = START,
) -> None:
    """Print an error as Python does, and then what to do: this is `sys.excepthook`. This package's own errors, and
    syntax of Python 2, are one line. here, start: see `advice_on`."""
    cause = error
    while cause.__context__:  # MXNet hides which module it could not import
        cause = cause.__context__
    code = python2.code_of(cause) if isinstance(cause, SyntaxError) else ""
    frames = extract_tb(cause.__traceback__)
    message = str(cause) or (frames[-1].line if frames else "") or ""  # of an assert statement, its code
    advice = advice_on(message, code, here=here, start=start)
    if isinstance(cause, ImportError) and python2.is_beside_importer(cause):
        advice = python2.CONVERT
    advice = advice.replace("FILE.py", shlex.quote(_users_file(cause) or "FILE.py"))
    if isinstance(error, Error):
        log.error("; ".join(filter(None, [str(error), advice])))
    elif isinstance(error, SyntaxError) and advice:
        log.error(f"{error.filename}, line {error.lineno}: {advice}")
    else:
        sys.__excepthook__(kind, error, traceback)
        if advice:
            log.say(advice)


def _users_file(error: BaseException) -> str:
    """The last file of the user's that led to an error; empty if there is none."""
    files = [frame.filename for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        files.append(error.filename or "")
    installed = (sys.prefix, sys.base_prefix)
    return next((file for file in reversed(files) if os.path.isfile(file) and not file.startswith(installed)), "")


def advice_on(message: str, code: str = "", *, here: bool = False, start: Sequence[str] = START) -> str:
    """What to do about the message of an error; empty if unknown.

    code: what contains a syntax error. here: the program runs in the current environment, with `--here`. start: the
    command that started it, up to and after the place where an option can be added.
    """
    if any(re.match(pattern, message) for pattern in python2.ERRORS) or (code and python2.is_convertible(code)):
        return python2.CONVERT
    by_hand = next((advice for pattern, advice in python2.BY_HAND if re.match(pattern, message)), None)
    if by_hand:
        return f"if this is written for Python 2: {by_hand}"
    if cuda.DRIVER in message and not here:
        return f"without a GPU, use MXNet for CPUs: `{' --cpu '.join(start)}`"
    edition = next((edition for pattern, edition in packages.EDITIONS if re.search(pattern, message)), None)
    if edition:
        return f"the program is for another edition of the book: `{f' --with {edition} '.join(start)}`"
    if re.match(rf"(module|No module named) '({VERSIONED})\b", message):
        if here:
            return "if the program is for MXNet 1.9.1 and packages of its time, omit --here"
        return "if the program is for newer packages, use those of the current environment, with --here"
    missing = re.search(r"No module named '([A-Za-z]\w*)", message)
    needed = next((package for pattern, package in packages.NEEDED if re.match(pattern, message)), None)
    if missing and missing[1] == "tkinter":
        return "this Python has no Tk (Debian, Ubuntu: python3-tk)"
    if missing:
        needed = packages.REQUIREMENTS.get(missing[1], missing[1])
    if needed is None:
        return ""
    what = f"if {missing[1]} is a package, add it" if missing else f"add {needed}"
    return f"{what} to the environment: `{f' --with {needed} '.join(start)}`"
