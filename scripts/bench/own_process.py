"""A measurement in a process of its own: the engine reads its settings once, and they depend on what is measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tqdm import tqdm

from bench import machine
from gluon_mgpu.runtime.errors import Error, UsageError

SECONDS = 300


def lines(
    name: str,
    module: str,
    *given: object,
    settings: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    seconds: float = SECONDS,
    advice: str = "give fewer steps",
) -> Iterator[Any]:
    """Run `python -m MODULE GIVEN...` and yield each line of JSON that it prints, as it comes.

    name: of what is measured, for messages. settings: environment variables and their values, a dict or pairs, in place
    of the user's settings of the engine. advice: what to do where it is not done after so many seconds. The worker's
    notices go to standard error. However this ends, no worker is left. Raises the worker's own Error or UsageError, and
    Error where it fails in another way.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(machine.SETTINGS)}
    command, late = [sys.executable, "-m", module, *map(str, given)], threading.Event()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        worker = subprocess.Popen(
            command,
            env={**environment, **dict(settings)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            errors="replace",
        )
        assert worker.stdout

        def end() -> None:
            late.set()
            worker.kill()

        too_late, printed = threading.Timer(seconds, end), 0
        try:
            too_late.start()
            for line in worker.stdout:
                printed += 1
                line = _plain(line)
                try:
                    yield json.loads(line)
                except ValueError:
                    raise Error(f"{name} failed: it printed {line.strip()!r}") from None
            worker.wait()
        finally:
            too_late.cancel()
            worker.kill()
            worker.wait()
            worker.stdout.close()
        errors.seek(0)
        said = [_plain(line) for line in errors.read().strip().splitlines()] or ["no message"]
    for line in said:
        if line.startswith("gluon_mgpu: "):
            tqdm.write(line, file=sys.stderr)
    if late.is_set():
        raise Error(f"{name} was not done after {seconds} s: {advice}")
    if worker.returncode == 0 and printed:
        return
    for line in reversed(said):  # the last one, unless a launcher had more to say
        for kind in (UsageError, Error):
            before, own, message = line.partition(f"{kind.__module__}.{kind.__name__}: ")
            if own and not before:
                raise kind(f"{name}: {message}")
    ended = f"ended by signal {-worker.returncode}: " if worker.returncode < 0 else ""
    raise Error(f"{name} failed: {ended}{said[-1]}")


def _plain(line: str) -> str:
    """Without what horovodrun puts before a line of a process."""
    return re.sub(r"^\[\d+\]<std(out|err)>:", "", line)


def last(*args: Any, **options: Any) -> Any:
    """What the last line of `lines` holds."""
    *_, found = lines(*args, **options)
    return found
