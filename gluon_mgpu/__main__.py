"""`python -m gluon_mgpu train ...` runs `gluon-mgpu train ...`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback

from gluon_mgpu.support import errors, log, mpi


def main(program: str = "gluon-mgpu") -> None:
    run_command("gluon_mgpu.commands.main", "main", program)


def run_command(module: str, command: str, program: str | None = None) -> None:
    """Import a module and run its click command. If the import fails, exit with a one-line error message.

    program: the program's name in messages; None: `python` followed by the script's path.
    """
    _open_closed_streams()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # then SIGTERM also stops child processes
    try:
        function = getattr(importlib.import_module(module), command)
    except KeyboardInterrupt:
        if log.rank() is None:
            sys.exit(130)
        mpi.fail("interrupted", 130)
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        mpi.fail(errors.line_of(error), 1)
    try:
        function(prog_name=program)
    finally:
        signal.signal(signal.SIGTERM, before)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # nobody reads, or the disk is full; from Python 3.14 on, the status would be 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_closed_streams() -> None:
    """Open /dev/null in place of each closed standard stream. Otherwise, a data file could get the stream's number, and
    MXNet's output would be written into the data file."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # a flag since Python 3.11
        sys.path.append(sys.path.pop(0))  # so that modules in the current folder, such as random.py, hide no others
    main("python -m gluon_mgpu")
