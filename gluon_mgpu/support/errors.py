"""Errors for the user. Each message is one line that names the problem and the invalid value, and says what to do.

Messages name settings and commands through `setting` and `command`, which spell them for the caller: `lr=0` in Python,
and `--lr 0` on the command line, which sets `caller`.
"""

from __future__ import annotations

import math
import numbers
import os
import platform
import re
import shlex
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

# Debian's packages of the libraries that libmxnet.so needs.
LIBRARIES = "libgomp1 libstdc++6 libgcc-s1" + " libquadmath0" * (platform.machine() == "x86_64")

# {module: arguments of `pip install`}; for any other module, the argument is the module's name.
PACKAGES = {"PIL": "pillow", "distutils": "setuptools", "mxnet": "--no-deps mxnet==1.9.1"}

LONGEST = 80  # characters of a value in a message, unless it is a text or a path

user_files: set[str] = set()  # the user's own lesson files; an error in one of them names its line


@dataclass
class Caller:
    """What messages are written for. By default, a program in Python.

    options: {setting: option} of the command that is running. program: what the user typed before the command's name.
    tracebacks: whether to show them.
    """

    options: dict[str, str] = field(default_factory=dict)
    program: str = "gluon-mgpu"
    tracebacks: bool = True


caller = Caller()


class Error(Exception):
    """The run failed. The message is the line that the user sees."""

    exit_status = 1


class UsageError(Error):
    """The command was wrong: a setting is invalid, or this machine or data set does not support the setting's value.

    name: a setting, an argument or an environment variable; None if the value has no name, as for a file. value: the
    rejected value; None to name only the setting. advice: what is wrong, and what to do.
    """

    exit_status = 2

    def __init__(self, name: str | None, value: object, advice: str) -> None:
        self.name, self.value, self.advice = name, value, advice
        subject = setting(name, value) if name else str(value or "")
        super().__init__(f"{subject}: {advice}" if subject else advice)


def check_whole(name: str, value: object, least: int, most: float = math.inf, advice: str = "") -> None:
    """Raise UsageError unless a value is a whole number in this range."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise UsageError(name, value, advice or f"must be a whole number of at least {least}")


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C, once the current step is complete and the checkpoint is saved. The message is one line."""

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows instead of a traceback."""
        return [f"KeyboardInterrupt: {self}"]


def setting(name: str, value: object = None) -> str:
    """Write a setting as the caller does: `epochs=5` in Python, `--epochs 5` or just the value of an argument on the
    command line. If the value is None, write only the name."""
    option = caller.options.get(name)
    if not option:
        return name if value is None else f"{name}={_repr(value)}"
    if value is False:
        return option.replace("--", "--no-", 1)
    if not option.startswith("-") and value is not None:
        return shlex.quote(shown(value))
    return option if value is None or value is True else f"{option} {shlex.quote(shown(value))}"


def _repr(value: object) -> str:
    """A value as in Python, in one line. An array, a long list or an object's long description is cut."""
    if isinstance(value, (str, os.PathLike)):
        return repr(os.fspath(value))
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def command(words: str) -> str:
    """Spell a command for the caller: "train --gpus 2" -> `gluon-mgpu train --gpus 2`, or with the script's name."""
    program, name = caller.program, words.split(" ")[0]
    script = Path(shlex.split(program)[-1])
    if script.suffix != ".py":
        return f"{program} {words}"
    return program + words[len(name) :] if script.stem == name else f"python -m gluon_mgpu {words}"


def shown(value: object) -> str:
    """Format a setting's value: (1, 2) -> "1,2"."""
    if isinstance(value, (list, tuple)):
        return ",".join(f"{number:g}" if isinstance(number, float) else str(number) for number in value)
    return str(value)


def line_of(error: BaseException) -> str:
    """Describe an error in one line: the reason, and if the error was not expected, how to find out more."""
    if isinstance(error, Error):
        return str(error)
    is_ours = isinstance(error, ImportError) and not _users_line(error)
    doctor = f"`{command('doctor')}` may say what to do; " if is_ours else ""
    return f"{reason(error)} ({doctor}--debug shows the traceback)"


def reason(error: BaseException) -> str:
    """Describe why an error happened: in a user's file, the line and the message; elsewhere, what is missing and what
    to do, or else the last line of the error's message."""
    if isinstance(error, Error):
        return str(error)
    users_line = _users_line(error)
    if isinstance(error, ImportError) and not users_line:
        while error.__context__:  # NumPy's message is a page of advice; the cause is the first error in the chain
            error = error.__context__
    message = str(error.msg if isinstance(error, SyntaxError) else error).strip()
    module = re.search(r"No module named '(\w+)'", message)
    if module and not users_line:
        pip = f"`pip install {PACKAGES.get(module[1], module[1])}`"
        return f"{module[1]} is not installed for {sys.executable}: use .venv/bin/python, which has it, or run {pip}"
    library = re.search(r"([^\s/]+\.so[^\s:]*): cannot open shared object file", message)
    if library and not users_line:
        apt = f"MXNet needs `apt install {LIBRARIES}` on Debian or Ubuntu"
        return f"{library[1]} is missing on this machine: install the package that contains it; {apt}"
    return f"{users_line}{type(error).__name__}: {message.splitlines()[-1] if message else ''}"


def _users_line(error: BaseException) -> str:
    """The last line of the user's own files that led to the error, as "FILE, line N: "; empty if there is none."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    lines = [f"{name}, line {number}: " for name, number in places if name in user_files]
    return lines[-1] if lines else ""
