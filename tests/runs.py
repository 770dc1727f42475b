"""Runs of train.py on several workers, for the tests: with launch.py or horovodrun, over loopback."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gluon_mgpu.runtime import engine

ROOT = Path(__file__).parents[1]
TRAIN = [sys.executable, str(ROOT / "scripts/train.py")]
HORIZON = 240  # seconds, on a busy machine
HOROVODRUN = str(Path(sys.executable).with_name("horovodrun"))
HOROVOD = importlib.util.find_spec("horovod")
NO_HOROVOD = "Horovod is not installed: make horovod"
MARKS = {
    "dist_sync": (),
    "horovod": pytest.mark.skipif(not HOROVOD, reason=NO_HOROVOD),
}
ENGINES = [pytest.param(engine, marks=marks) for engine, marks in MARKS.items()]


def command(kvstore, workers, *args, servers=1, program=None):
    """The command of a run. program: what each process runs, default train.py with this kvstore and args."""
    program = program or [*TRAIN, "--kvstore", kvstore, *map(str, args)]
    if kvstore == "horovod":
        return [HOROVODRUN, "--gloo", "-np", str(workers), "-H", f"localhost:{workers}", *program]
    launch = [sys.executable, str(ROOT / "scripts/launch.py"), "--workers", str(workers), "--servers", str(servers)]
    return [*launch, "--", *program]


def start(line, **options):
    """The run as a Popen, in a session of its own: its processes are found by it."""
    environment = {**engine.users_environment(), "PYTHONUNBUFFERED": "1", **options.pop("environment", {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, env=environment, start_new_session=True, **streams, **options)


def run(kvstore, workers, *args, **options):
    """(exit status, standard output, standard error) of a run that ends."""
    with start(command(kvstore, workers, *args, **options)) as process:
        try:
            out, err = process.communicate(timeout=HORIZON)
        except BaseException:
            end(process)
            raise
    return process.returncode, out, err


def processes(mark):
    """{name: pid} of the processes that have `mark` among their arguments: "worker 0", "scheduler", ..."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_text().split("\0")
            environment = dict(e.partition("=")[::2] for e in (folder / "environ").read_text().split("\0"))
        except OSError:
            continue
        if mark not in arguments or _state(folder.name) == "Z" or "train.py" not in (arguments + ["", ""])[1]:
            continue
        if "HOROVOD_RANK" in environment:
            found[f"worker {environment['HOROVOD_RANK']}"] = int(folder.name)
        elif environment.get("DMLC_ROLE") == "scheduler":
            found["scheduler"] = int(folder.name)
        elif "DMLC_ROLE" in environment:
            found[f"{environment['DMLC_ROLE']} {environment['DMLC_TASK_ID']}"] = int(folder.name)
    return found


def wait(done, seconds=HORIZON):
    """Until done(); AssertionError where it is not within so many seconds."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)


def alive(pids):
    """Those of the processes that have not ended."""
    return [pid for pid in pids if _state(pid) not in (None, "Z")]


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return None


def end(process):
    """Kill a run and all that it started."""
    for pid in _descendants(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.kill()


def _descendants(pid):
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found, ahead = [], [pid]
    while ahead:
        ahead += children.get(ahead[0], [])
        found.append(ahead.pop(0))
    return found


def lines(err):
    """What the processes of a run said was wrong, without horovodrun's prefixes."""
    return [
        line
        for line in (re.sub(r"^\[\d+\]<std(out|err)>:", "", line) for line in err.splitlines())
        if line.startswith("error: ")
    ]


def copy(folder, to):
    shutil.copytree(folder, to)
    return to
