"""Notices on standard error. With several processes, worker 0 speaks for all of them.

Launchers tell a process who it is through environment variables; nothing here imports more than the standard library.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def say(line: str, prefix: str = "gluon_mgpu: ") -> None:
    """Print a notice on standard error, if this process is worker 0 or alone."""
    if speaks():
        with suppress(OSError):  # the reader may be gone
            print(f"{prefix}{line}", file=sys.stderr)


def started() -> bool:
    """Whether a launcher (horovodrun, launch.py) started this process as one of several."""
    return "HOROVOD_RANK" in os.environ or "DMLC_ROLE" in os.environ


def speaks() -> bool:
    """Whether this process is worker 0, or alone."""
    return who() in ("", "worker 0: ")


def who() -> str:
    """The prefix of this process's error messages: "worker 1: ", or "" if it runs alone."""
    if "DMLC_ROLE" in os.environ:
        role, rank = os.environ["DMLC_ROLE"], os.environ.get("DMLC_TASK_ID", "0")
    elif "HOROVOD_RANK" in os.environ:
        role, rank = "worker", os.environ["HOROVOD_RANK"]
    else:
        return ""
    return "the scheduler: " if role == "scheduler" else f"{role} {rank}: "
