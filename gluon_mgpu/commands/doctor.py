"""`gluon-mgpu doctor`: shows what this machine can run, one line per finding, and how to fix problems.

It must start even if NumPy or MXNet is missing or broken. So at startup, it imports only the standard library and
click, and a separate process with a time limit tries the main job.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import click

from gluon_mgpu.commands import common
from gluon_mgpu.compat import cuda, devices, startup
from gluon_mgpu.support import errors, log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError

MAIN_JOB = "train --impl scratch --gpus 2"
TRIAL = ("--epochs=1", "--dataset=synthetic", "--limit=512", "--seed=1")
NEWEST_PYTHON = (3, 15)  # of those that were tried
Finding = tuple[str, str]  # (mark, line). "problem": the main job cannot run; "note": something else does not work
COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
SECONDS = 120  # time limit for a process that imports MXNet on a busy machine


@common.command(
    examples="""
        gluon-mgpu doctor
        gluon-mgpu doctor --data-dir data
    """,
)
@common.option("--data-dir", metavar="DIR", help="Folder that contains the data set.")  # `settings` needs NumPy
@click.pass_context
def doctor(context: click.Context, data_dir: str | None) -> None:
    """Check what this machine can run: print one line per finding about packages, cores and data, and train briefly on
    2 devices. The exit status is 1 if the main job, train --impl scratch --gpus 2, cannot run."""
    problems = 0
    for mark, line in findings(data_dir):
        problems += mark == "problem"
        click.echo(f"{click.style(f'{mark:9}', fg=COLOURS[mark])}{line}")
    click.echo(f"cannot run {MAIN_JOB}: see the problems above" if problems else f"can run {MAIN_JOB}")
    context.exit(1 if problems else 0)


def findings(data_dir: str | Path | None = None) -> Iterator[Finding]:
    """Yields each finding as soon as it is known."""
    machine = f"Python {platform.python_version()} on {platform.system()}, {platform.machine()}"
    is_new = sys.version_info[:2] > NEWEST_PYTHON
    yield ("note", f"{machine}: this version of Python is untested") if is_new else ("ok", machine)
    packages = [_package("NumPy", "'numpy>=1.22'"), _package("MXNet", "--no-deps mxnet==1.9.1")]
    yield from packages
    yield _cores()
    works = all(mark == "ok" for mark, _ in packages)
    yield from _gpus(works)
    if works:
        trial = _trial()
        yield trial
        if trial[0] == "ok":
            yield _data(data_dir)


def _package(name: str, requirement: str) -> Finding:
    """Whether a package is installed. It is not imported, because a broken package may crash."""
    if importlib.util.find_spec(name.lower()) is None:
        return "problem", f"{name} is not installed: run `pip install {requirement}`"
    wheels = cuda.wheels() if name == "MXNet" else {}
    with suppress(metadata.PackageNotFoundError):
        wheels = wheels or {name: metadata.version(name)}
    return "ok", " and ".join(f"{wheel} {version}" for wheel, version in wheels.items()) or f"{name} (not from a wheel)"


def _cores() -> Finding:
    allowed = startup.cores()
    cores = cgroup_cores() or allowed
    contexts = max(1, min(allowed, int(cores)))
    sharing = f"--gpus above {contexts} works, but CPU contexts then share cores"
    if cores >= allowed:
        return "ok", f"{allowed} core{'s'[: allowed != 1]}: {sharing}"
    threads = f"with --gpus 1, set OMP_NUM_THREADS={contexts}, because the default is {allowed} threads"
    return "note", f"{cores:g} of {allowed} cores (the container's quota): {sharing}; {threads}"


def _gpus(packages_work: bool) -> Iterator[Finding]:
    """Each GPU, and whether MXNet computes on it. A separate process tries that, because it may crash or hang."""
    try:
        gpus = cuda.driver_gpus()
    except Error as error:
        yield "note", str(error)
        return
    wheels = cuda.wheels() if packages_work else {}
    for index, (name, major, minor) in enumerate(gpus):
        gpu = f"GPU {index}, {name}, compute capability {major}.{minor}"
        if not packages_work:
            yield "note", f"{gpu}: not tried, because a package is missing"
        elif wheels and not any("-cu" in wheel for wheel in wheels):
            yield "note", f"{gpu}: not used, because MXNet's wheel for CPUs is installed (docs/install.md)"
        elif reason := devices.missing_kernels(major, minor):
            yield "note", f"{gpu}: {reason}"
        else:
            code = f"import gluon_mgpu; from gluon_mgpu.compat import devices; devices.try_gpu({index})"
            try:
                finished = subprocesses.run([sys.executable, "-c", code], seconds=SECONDS)
                subprocesses.raise_for_status(gpu, finished, "run nvidia-smi to see whether the driver hangs")
                yield "ok", f"{gpu}: works (a product and a convolution are right)"
            except Error as error:
                yield "note", str(error)


def cgroup_cores(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    """The number of cores that this container may use; None: no quota."""
    with suppress(OSError, ValueError):
        quota, period = path.read_text().split()  # "150000 100000" or "max 100000"
        return int(quota) / int(period)
    return None


def _trial() -> Finding:
    """Run the main job with 512 synthetic examples. If it uses no GPU, `train` prints why."""
    users = (
        subprocesses.users_environment()
    )  # a child process is not a worker, even if doctor runs in a worker's environment
    environment = {name: value for name, value in users.items() if name not in log.RANKS}
    command = [sys.executable, "-m", "gluon_mgpu", *MAIN_JOB.split(), *TRIAL]
    finished = subprocesses.run(command, env=environment, seconds=SECONDS)
    try:
        advice = f"run `{errors.command(MAIN_JOB)}` to see where it hangs"
        subprocesses.raise_for_status(f"a trial of {MAIN_JOB}", finished, advice)
    except Error as error:  # a UsageError means that a setting is wrong, not a package
        repair = "; if a package is broken, try `pip install --force-reinstall`"
        return "problem", f"{error}{'' if isinstance(error, UsageError) or '`' in str(error) else repair}"
    return "ok", f"a trial with 512 synthetic examples succeeded, {finished.out.splitlines()[0]}"


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
