"""Says what to do about an error that ends an old program, if that is known."""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from types import TracebackType

from gluon_mgpu.old import packages
from gluon_mgpu.support import log

PYTHON_2_MODULES = "ConfigParser HTMLParser Queue StringIO __builtin__ cPickle cStringIO httplib urllib2 urlparse"
PYTHON_2_NAMES = "basestring long raw_input reduce unichr unicode xrange"


def explain(kind: type[BaseException], error: BaseException, traceback: TracebackType | None, *, here: bool) -> None:
    """Print an error as Python does, and then what to do. A program for Python 2 gets only the latter: this is
    `sys.excepthook`. here: the program runs in the current environment, with `--here`."""
    old = python_2_file(error)
    if old is not None:
        return log.error(f"{old} is written for Python 2: convert it with `gluon-mgpu run -m lib2to3 -w {old}`")
    sys.__excepthook__(kind, error, traceback)
    while error.__context__:  # MXNet hides which module it could not import
        error = error.__context__
    advice = advice_on(str(error), here)
    if advice:
        log.say(advice)


def advice_on(message: str, here: bool = False) -> str:
    """What to do about the message of an ImportError or AttributeError; empty if unknown. here: see `explain`."""
    requirement = next((edition for pattern, edition in packages.EDITIONS if re.search(pattern, message)), None)
    if requirement:
        return f"the program is for another edition of the book: `gluon-mgpu run --with {requirement} ...`"
    if re.match(r"module '\w+(\.\w+)*' has no attribute", message):
        if here:
            return "if the program is for MXNet 1.9.1 and packages of its time, omit --here"
        return "if the program is for newer packages, use those of the current environment: `gluon-mgpu run --here ...`"
    missing = re.search(r"No module named '([\w.]+)'", message)
    if missing is None:
        return ""
    name = missing[1].partition(".")[0]
    requirement = packages.REQUIREMENTS.get(missing[1], packages.REQUIREMENTS.get(name, name))
    return f"if {name} is a package, add it to the environment: `gluon-mgpu run --with {requirement} ...`"


def python_2_file(error: BaseException) -> str | None:
    """The file of a program for Python 2, if this error shows that it is one."""
    if isinstance(error, SyntaxError):
        return error.filename if error.filename and _is_python_2(error.filename) else None
    found = re.fullmatch(r"(?:name|No module named) '(\w+)'(?: is not defined.*)?", str(error))
    known = {NameError: PYTHON_2_NAMES, ModuleNotFoundError: PYTHON_2_MODULES}.get(type(error), "")
    if found is None or found[1] not in known.split():
        return None
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place.tb_frame.f_code.co_filename if place else None


def _is_python_2(path: str) -> bool:
    """Whether 2to3 can parse a file, but Python 3 cannot."""
    try:
        from lib2to3 import pygram, pytree
        from lib2to3.pgen2 import driver, parse

        with tokenize.open(path) as file:
            text = f"{file.read()}\n"
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError):  # Python 3.13 removed lib2to3
        return False
    try:
        ast.parse(text)
        return False
    except SyntaxError:
        pass
    try:
        driver.Driver(pygram.python_grammar, pytree.convert).parse_string(text)
        return True
    except (parse.ParseError, tokenize.TokenError, IndentationError):
        return False
