"""`gluon-mgpu doctor`: shows what this machine can run, one line per finding, and how to fix problems.

It must start even if NumPy or MXNet is missing or broken. So at startup, it imports only the standard library and
click, and it runs everything that could crash or hang in a separate process with a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.runtime import cuda, devices, engine, errors, subprocesses
from gluon_mgpu.runtime.errors import Error, UsageError

MAIN_JOB = "train --impl scratch --gpus 2"
TRIAL = ("--epochs=1", "--dataset=synthetic", "--limit=512", "--seed=1")
Facts = dict[str, Any]
Finding = tuple[str, str]  # (mark, line). "problem": the main job cannot run; "note": something else does not work
COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
SECONDS = 120  # time limit for a process that imports MXNet on a busy machine


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu doctor
        gluon-mgpu doctor --data-dir data
    """,
)
@common.settings("data_dir")
@click.pass_context
def doctor(context: click.Context, data_dir: str | None) -> None:
    """Check what this machine can run. This prints one line per finding about Python, NumPy, MXNet and its libraries,
    cores, GPUs and data. If there are no problems, it then trains briefly on 2 devices. The exit status is 1
    if the main job, train --impl scratch --gpus 2, cannot run."""
    problems = 0
    for mark, line in findings(data_dir):
        problems += mark == "problem"
        click.echo(f"{click.style(f'{mark:9}', fg=COLOURS[mark])}{line}")
    click.echo(f"cannot run {MAIN_JOB}: see the problems above" if problems else f"can run {MAIN_JOB}")
    context.exit(1 if problems else 0)


def findings(data_dir: str | Path | None = None) -> Iterator[Finding]:
    """Yields each finding as soon as it is known. If there are no problems, ends with a trial run of the main job."""
    yield "ok", f"Python {platform.python_version()} on {platform.system()}, {platform.machine()}"
    numpy, _ = _package("NumPy", import_numpy, "`pip install 'numpy>=1.22'`")
    yield numpy
    mxnet, facts = _package("MXNet", import_mxnet, "`pip install --no-deps mxnet==1.9.1`")
    yield mxnet
    yield _cores()
    yield from _gpus(facts.get("cuda", False))
    data = _data(data_dir) if numpy[0] == "ok" else ("note", "the data set was not checked: see above")
    yield data
    if all(mark != "problem" for mark, _ in (numpy, mxnet, data)):
        yield _trial(facts["gpus"])


def _package(name: str, probe: Callable[[], Facts], remedy: str) -> tuple[Finding, Facts]:
    """Check a Python package. Returns the finding and the facts that `probe` returns.

    probe: a function that imports the package. remedy: the command that installs it.
    """
    if importlib.util.find_spec(name.lower()) is None:
        return ("problem", f"{name} is not installed: run {remedy}"), {}
    try:
        facts = _in_child(f"importing {name}", probe)
    except Error as error:  # a UsageError means that a setting is wrong, not the package
        repair = f"; try {remedy.replace('install', 'install --force-reinstall')}"
        return ("problem", f"{error}{'' if isinstance(error, UsageError) or '`' in str(error) else repair}"), {}
    return ("ok", facts["line"]), facts


def import_numpy() -> Facts:
    import numpy

    return {"line": f"NumPy {numpy.__version__}"}


def import_mxnet() -> Facts:
    engine.configure(2)
    import mxnet as mx

    wheels = " and ".join(f"{name} {version}" for name, version in cuda.wheels().items()) or "not from a wheel"
    with_cuda, gpus = mx.runtime.Features().is_enabled("CUDA"), mx.context.num_gpus()
    built = f"with CUDA; it sees {gpus} GPU{'s'[: gpus != 1]}" if with_cuda else "without CUDA"
    return {"line": f"MXNet {mx.__version__} ({wheels}), built {built}", "cuda": with_cuda, "gpus": gpus}


def list_gpus() -> Facts:
    return {"gpus": devices.driver_gpus()}


def answer(probe: Callable[[], Facts]) -> None:
    """Print the result of probe() as JSON. Runs in the child process that `_in_child` starts."""
    try:
        print(json.dumps(probe()))
    except Exception as error:
        print(f"error: {errors.reason(error)}", file=sys.stderr)
        sys.exit(getattr(error, "exit_status", 1))


def _in_child(what: str, probe: Callable[[], Facts]) -> Facts:
    """Call a function of this module in a child process. Returns the function's result. Raises Error if the call
    fails."""
    finished = _run("-c", f"from gluon_mgpu.commands import doctor; doctor.answer(doctor.{probe.__name__})")
    subprocesses.check(what, finished)
    return json.loads(finished.out.splitlines()[-1])


def _run(*arguments: str) -> subprocesses.Finished:
    """Run Python in a child process that is not a worker, even if doctor runs in a worker's environment."""
    users = engine.users_environment()
    environment = {name: value for name, value in users.items() if not name.startswith(("DMLC_", "HOROVOD_"))}
    return subprocesses.run([sys.executable, *arguments], env=environment, seconds=SECONDS)


def _cores() -> Finding:
    allowed = len(os.sched_getaffinity(0))
    cores = cgroup_cores() or allowed
    contexts = max(1, min(allowed, int(cores)))
    sharing = f"--gpus above {contexts} works, but CPU contexts then share cores"
    if cores >= allowed:
        return "ok", f"{allowed} core{'s'[: allowed != 1]}: {sharing}"
    threads = f"with --gpus 1, set OMP_NUM_THREADS={contexts}, because the default is {allowed} threads"
    return "note", f"{cores:g} of {allowed} cores (the container's quota): {sharing}; {threads}"


def cgroup_cores(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """The number of cores that this container may use; None: no quota."""
    with suppress(OSError, ValueError):
        quota, period = path.read_text().split()  # "150000 100000" or "max 100000"
        return int(quota) / int(period)
    return None


def _gpus(built_with_cuda: bool) -> Iterator[Finding]:
    """Yields findings about the GPUs that NVIDIA's driver reports. built_with_cuda: whether MXNet has CUDA support."""
    try:
        gpus = _in_child("asking NVIDIA's driver", list_gpus)["gpus"]
    except Error as error:
        yield "note", f"{error}; reboot, or use --device cpu"
        return
    if not gpus:
        yield "ok", "no NVIDIA GPU is visible: training runs on CPU contexts"
    for name, major, minor in gpus:
        gpu = f"GPU {name}, compute capability {major}.{minor}"
        if built_with_cuda and major in devices.KERNELS:
            yield "ok", f"{gpu}: MXNet supports it"
        else:
            needs = f"needs mxnet-cu112 (docs/install.md) and compute capability {devices.KERNELS_FOR}"
            yield "note", f"{gpu}: {needs}; use --device cpu"


def _data(data_dir: str | Path | None) -> Finding:
    """Check the data set of the main job."""
    try:
        from gluon_mgpu.training import datasets

        folder = datasets.find("fashion-mnist", data_dir)
        if not folder:
            return "note", "fashion-mnist is not on this machine: it will be downloaded when needed"
        datasets.read(folder, "fashion-mnist")
    except Exception as error:  # includes a missing or broken library that `datasets` needs
        return "problem", errors.reason(error)
    return "ok", f"fashion-mnist is in {folder}, with the expected SHA-256 checksums"


def _trial(gpus: int) -> Finding:
    """Run the main job with 512 synthetic examples. gpus: the number of GPUs that MXNet sees."""
    device = "--device=auto" if gpus else "--device=cpu"  # with cpu, train prints no notice about missing GPUs
    finished = _run("-m", "gluon_mgpu", *MAIN_JOB.split(), device, *TRIAL)
    advice = f"run `{errors.command(MAIN_JOB)}` to see where it hangs"
    try:
        subprocesses.check(f"a trial of {MAIN_JOB}", finished, advice)
    except Error as error:
        return "problem", str(error)
    return "ok", f"a trial with 512 synthetic examples succeeded, {finished.out.splitlines()[0]}"
