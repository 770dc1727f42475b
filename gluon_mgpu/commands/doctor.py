"""`gluon-mgpu doctor`: shows what this machine can run, one line per finding, and how to fix problems.

It must start even if NumPy or MXNet is missing or broken, so separate processes with a time limit import them.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import click

from gluon_mgpu.commands import common
from gluon_mgpu.compat import cuda, startup
from gluon_mgpu.support import errors, log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError

MAIN_JOB = "train --impl scratch --gpus 2"
TRIAL = ("--epochs=1", "--dataset=synthetic", "--limit=512", "--seed=1")
SECONDS = 120  # time limit for a process that imports MXNet on a busy machine
Finding = tuple[str, str]  # (mark, line). "problem": the main job cannot run; "note": something else does not work


@common.command(examples="gluon-mgpu doctor\ngluon-mgpu doctor --data-dir data")
@common.option("--data-dir", metavar="DIR", help="Folder that contains the data set.")  # `settings` needs NumPy
@click.pass_context
def doctor(context: click.Context, data_dir: str | None) -> None:
    """Check what this machine can run: print one line per finding about packages, cores, GPUs and data, and train
    briefly on 2 devices. The exit status is 1 if the main job, train --impl scratch --gpus 2, cannot run."""
    marks = set()
    for mark, line in findings(data_dir):
        marks.add(mark)
        click.echo(f"{mark:9}{line}")
    click.echo(f"cannot run {MAIN_JOB}: see the problems above" if "problem" in marks else f"can run {MAIN_JOB}")
    context.exit(1 if "problem" in marks else 0)


def findings(data_dir: str | Path | None = None) -> Iterator[Finding]:
    """Yield each finding as soon as it is known."""
    yield "ok", f"Python {platform.python_version()} on {platform.system()}, {platform.machine()}"
    works = True
    for name, requirement in (("numpy", "'numpy>=1.22'"), ("mxnet", "--no-deps mxnet==1.9.1")):
        if importlib.util.find_spec(name) is None:
            works = False
            yield "problem", f"{name} is not installed: run `pip install {requirement}`"
        else:
            wheels = cuda.wheels() if name == "mxnet" else {}
            with suppress(metadata.PackageNotFoundError):
                wheels = wheels or {name: metadata.version(name)}
            yield "ok", ", ".join(map(" ".join, wheels.items())) or f"{name}, not from a wheel"
    cores = startup.cores()
    yield "ok", f"{cores} {log.plural(cores, 'core')}; more CPU contexts than cores share them"
    threads = os.environ.get("OMP_NUM_THREADS", str(startup.own_threads()))
    yield "ok", f"number of threads of old programs: {threads}; OMP_NUM_THREADS changes it"
    if not works:
        return
    try:
        for index, (name, major, minor) in enumerate(cuda.driver_gpus()):
            gpu = f"GPU {index}, {name}, compute capability {major}.{minor}"
            code = f"import gluon_mgpu; from gluon_mgpu.compat import devices; print(devices.try_gpu({index}))"
            advice = "run nvidia-smi to see whether the driver hangs"
            yield _try(gpu, subprocesses.python(code), advice, "note")
    except Error as error:
        yield "note", str(error)
    command = [sys.executable, "-m", "gluon_mgpu", *MAIN_JOB.split(), *TRIAL]
    mark, line = _try(MAIN_JOB, command, f"run `{errors.command(MAIN_JOB)}` to see where it hangs", "problem")
    yield mark, line
    if mark == "ok":
        yield _data(data_dir)


def _try(name: str, command: list[str], advice: str, mark: str) -> Finding:
    """Run a program, which says in its first line what works. mark: of the finding if it fails."""
    finished = subprocesses.run(command, seconds=SECONDS)
    try:
        subprocesses.raise_for_status(name, finished, advice)
    except Error as error:  # a UsageError means that a setting is wrong, not a package
        repair = "; if a package is broken, try `pip install --force-reinstall`"
        return mark, f"{error}{'' if isinstance(error, UsageError) or '`' in str(error) else repair}"
    return "ok", f"{name} works: {finished.out.splitlines()[0]}"


def _data(data_dir: str | Path | None) -> Finding:
    """Check the data set of the main job."""
    from gluon_mgpu.data import datasets

    try:
        folder = datasets.find("fashion-mnist", data_dir)
        if not folder:
            return "note", "fashion-mnist is not on this machine: it will be downloaded when needed"
        datasets.read(folder, "fashion-mnist")
    except Error as error:
        return "problem", str(error)
    return "ok", f"fashion-mnist is in {folder}, with the expected SHA-256 checksums"
