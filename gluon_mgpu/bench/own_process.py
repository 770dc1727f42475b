"""A measurement in a process of its own: the engine reads its settings once, and they depend on what is measured."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading

from tqdm import tqdm

from gluon_mgpu.bench import machine
from gluon_mgpu.errors import Error, UsageError

SECONDS = 300


def lines(name, module, *given, settings=(), seconds=SECONDS, advice="give fewer steps"):
    """Run `python -m MODULE GIVEN...` and yield each line of JSON that it prints, as it comes.

    name: of what is measured, for messages. settings: pairs of environment variables and their values, in place of the
    user's settings of the engine. advice: what to do where it is not done after so many seconds. The worker's notices
    go to standard error. However this ends, no worker is left. Raises the worker's own Error or UsageError, and Error
    where it fails in another way.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(machine.SETTINGS)}
    command = [sys.executable, "-m", module, *map(str, given)]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with subprocess.Popen(command, env={**environment, **dict(settings)}, **streams) as worker:
            too_late = threading.Timer(seconds, worker.kill)
            too_late.start()
            try:
                for line in worker.stdout:
                    yield json.loads(line)
                worker.wait()
            finally:
                late = not too_late.is_alive()
                too_late.cancel()
                worker.kill()
        errors.seek(0)
        said = errors.read().strip().splitlines() or ["no message"]
    for line in said:
        if line.startswith("gluon_mgpu: "):
            tqdm.write(line, file=sys.stderr)
    if not worker.returncode:
        return
    if worker.returncode == -signal.SIGKILL and late:
        raise Error(f"{name} was not done after {seconds} s: {advice}")
    for kind in (UsageError, Error):
        before, own, message = said[-1].partition(f"{kind.__module__}.{kind.__name__}: ")
        if own and not before:
            raise kind(f"{name}: {message}")
    ended = f"ended by signal {-worker.returncode}: " if worker.returncode < 0 else ""
    raise Error(f"{name} failed: {ended}{said[-1]}")


def last(*args, **options):
    """What the last line of `lines` holds."""
    *_, found = lines(*args, **options)
    return found
