"""Errors for the user. Each message is one line that names the problem and the invalid value, and says what to do."""

import re
import sys

# System libraries that libmxnet.so needs, with their Debian packages.
LIBRARIES = {
    "libgomp.so.1": "libgomp1",
    "libquadmath.so.0": "libquadmath0",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
}

# {module: arguments of `pip install`}; for any other module, the argument is the module's name.
PACKAGES = {"PIL": "pillow", "distutils": "setuptools", "mxnet": "--no-deps mxnet==1.9.1"}


class Error(Exception):
    """The run failed. The message is the line that the user sees."""

    exit_status = 1


class UsageError(Error):
    """The command was wrong: an option is invalid, or this machine or data set does not support the option's value."""

    exit_status = 2


class Interrupted(KeyboardInterrupt):
    """Raised after Ctrl-C, once the current step is complete and the checkpoint is saved. The message is one line.

    Callers of `loop.train` get an ordinary KeyboardInterrupt with this message.
    """


def line_of(error: BaseException) -> str:
    """Describe an unexpected error in one line: the reason, and how to find out more."""
    doctor = "`gluon-mgpu doctor` may say what to do; " if isinstance(error, ImportError) else ""
    return f"{reason(error)} ({doctor}--debug shows the traceback)"


def reason(error: BaseException) -> str:
    """Describe why an error happened: what is missing and what to do, or else the last line of the error's message."""
    if isinstance(error, Error):
        return str(error)
    if isinstance(error, ImportError):
        while error.__context__:  # NumPy's message is a page of advice; the cause is the first error in the chain
            error = error.__context__
    message = str(error).strip()
    module = re.search(r"No module named '(\w+)'", message)
    if module:
        return (
            f"{module[1]} is not installed for {sys.executable}: use .venv/bin/python, which `make install` sets up, "
            f"or `pip install {PACKAGES.get(module[1], module[1])}`"
        )
    library = re.search(r"([^\s/]+\.so[^\s:]*): cannot open shared object file", message)
    if not library:
        return f"{type(error).__name__}: {message.splitlines()[-1] if message else ''}"
    if library[1] not in LIBRARIES:
        return f"{library[1]} is missing on this machine: install the package that contains it"
    return (
        f"MXNet needs {library[1]}, which is missing on this machine: run `apt install {' '.join(LIBRARIES.values())}` "
        "on Debian or Ubuntu"
    )
