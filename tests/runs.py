"""Runs of train.py with several workers on this machine, started by launch.py or horovodrun, for the tests."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gluon_mgpu.runtime import engine

ROOT = Path(__file__).parents[1]
TRAIN = [sys.executable, str(ROOT / "scripts/train.py")]
LAUNCH = [sys.executable, str(ROOT / "scripts/launch.py")]
FILES = ("cmdline", "environ")  # in /proc/PID
HORIZON = 240  # seconds, on a busy machine
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))
HOROVOD = importlib.util.find_spec("horovod")
needs_horovod = pytest.mark.skipif(not HOROVOD, reason="Horovod is not installed: make horovod")
MARKS = {"dist_sync": (), "horovod": needs_horovod}
ENGINES = [pytest.param(kvstore, marks=marks) for kvstore, marks in MARKS.items()]


SOONER = """
from gluon_mgpu.commands.launch import launch as command
from gluon_mgpu.distributed import launch
launch.SECONDS_TO_NOTICE = launch.SECONDS_TO_FINISH = launch.SECONDS_TO_INTERRUPT = 1
launch.SECONDS_TO_TERMINATE = 0.3
launch.LONGEST_DELAY = {}
command()
"""


def sooner(delay=0.1):
    """launch.py with shorter times. delay: the longest before a restart, in seconds."""
    return [sys.executable, "-c", SOONER.format(delay)]


def command(kvstore, workers, *args, servers=1, program=None, launcher=LAUNCH):
    """The command line of a run. program: what each process runs, default train.py with args."""
    program = program or [*TRAIN, "--kvstore", kvstore, *map(str, args)]
    if kvstore == "horovod":
        return [HOROVODRUN, "--gloo", "-np", str(workers), "-H", f"localhost:{workers}", *program]
    return [*launcher, "--workers", str(workers), "--servers", str(servers), "--", *program]


class Run(subprocess.Popen):
    """If its `with` block fails, the run ends, with all processes that it started."""

    def __exit__(self, kind, error, traceback):
        if error:
            end(self)
        super().__exit__(kind, error, traceback)


def start(line, environment=None, stdin=None):
    """The run as a Popen."""
    environment = {**engine.users_environment(), "PYTHONUNBUFFERED": "1", **(environment or {})}
    streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Run(line, env=environment, cwd=ROOT, start_new_session=True, **streams)


def run(kvstore, workers, *args, **options):
    """(exit status, standard output, standard error) of a run."""
    with start(command(kvstore, workers, *args, **options)) as process:
        out, err = process.communicate(timeout=HORIZON)
    return process.returncode, out, err


def errors(err):
    """The errors on a run's standard error, without the prefixes that horovodrun adds."""
    lines = [re.sub(r"^\[\d+\]<std(out|err)>:", "", line) for line in err.splitlines()]
    return [line for line in lines if line.startswith("error: ")]


def processes(mark):
    """{name: pid} of a run's processes, such as "worker 0" or "scheduler". mark: one of their arguments."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments, variables = ((folder / name).read_text(errors="replace").split("\0") for name in FILES)
        except OSError:
            continue
        if mark in arguments and "train.py" in arguments[1] and alive([folder.name]):
            environment = dict(variable.partition("=")[::2] for variable in variables)
            role = environment.get("DMLC_ROLE", "worker")
            rank = environment.get("HOROVOD_RANK") or environment.get("DMLC_TASK_ID")
            if rank or role == "scheduler":
                found[role if role == "scheduler" else f"{role} {rank}"] = int(folder.name)
    return found


def alive(pids):
    """The processes that have not ended."""
    return [pid for pid in pids if (_stat(pid) or "Z")[0] not in "ZX"]


def wait(done, seconds=HORIZON):
    """Wait until done(). AssertionError if that takes longer than some seconds."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)


def end(process):
    """Kill a run and all processes that it started."""
    parents = {int(f.name): _stat(f.name) for f in Path("/proc").glob("[0-9]*")}
    found = [process.pid]
    for parent in found:
        found += [pid for pid, stat in parents.items() if stat and stat[1] == str(parent)]
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _stat(pid):
    """The fields of /proc/PID/stat from the state on, or None."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
