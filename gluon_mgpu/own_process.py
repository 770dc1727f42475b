"""A run of `train` in a process of its own, since what the engine is set to depends on the number of contexts."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from gluon_mgpu import engine
from gluon_mgpu.errors import Error, UsageError
from gluon_mgpu.settings import joined

SECONDS_TO_END = 10


def train(name: str, options: dict[str, Any], on_epoch: Callable[[], object] = lambda: None, **environment: str) -> str:
    """`train` in a process of its own; returns what it said. Its notices go to standard error at once.

    Ctrl-C ends it as it ends any run, between two steps and with whole files: it gets that from here alone.
    """
    flags = {f"--{option.replace('_', '-')}": value for option, value in options.items()}
    given = [
        flag if value is True else f"{flag}={joined(value) if isinstance(value, tuple) else value}"
        for flag, value in flags.items()
        if value is not None and value is not False
    ]
    command = [sys.executable, "-m", "gluon_mgpu", "train", *given]
    said: list[str] = []
    with subprocess.Popen(
        command,
        env={**engine.users_environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal would send Ctrl-C to it too, and the second one is not held back
    ) as child:
        assert child.stdout
        try:
            for line in child.stdout:
                said.append(line)
                if line.startswith("epoch "):
                    on_epoch()
                if line.startswith("gluon_mgpu: "):
                    tqdm.write(line, file=sys.stderr, end="")
            child.wait()
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(SECONDS_TO_END)
            raise
        finally:
            if child.poll() is None:
                child.kill()
    if child.returncode:
        last = (said or [""])[-1].strip()
        why = last[len("error: ") :] if last.startswith("error: ") else f"ended with {child.returncode}: {last}"
        raise (UsageError if child.returncode == 2 else Error)(f"{name}: {why}")
    return "".join(said)
