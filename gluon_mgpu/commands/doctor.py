"""`gluon-mgpu doctor`: shows what this machine can run, one line per finding, and how to fix problems.

It must start even if NumPy or MXNet is missing or broken. So at startup, it imports only the standard library and
click, and it runs everything that could crash or hang in a separate process with a time limit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
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
OLDEST_CUDA = 11000  # what cuDriverGetVersion returns for CUDA 11.0, which the driver must support
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
SECONDS = 120  # time limit for a process that imports MXNet on a busy machine
DATA_SIZE = 31 << 20  # bytes; the size of the largest data set


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
    cores, GPUs, data, free space and Horovod. If there are no problems, it then trains briefly on 2 devices.
    The exit status is 1 if the main job, train --impl scratch --gpus 2, cannot run."""
    problems = 0
    for mark, line in findings(data_dir):
        problems += mark == "problem"
        click.echo(f"{click.style(f'{mark:9}', fg=COLOURS[mark])}{line}")
    click.echo(f"cannot run {MAIN_JOB}: see the problems above" if problems else f"can run {MAIN_JOB}")
    context.exit(1 if problems else 0)


def findings(data_dir: str | Path | None = None) -> Iterator[Finding]:
    """Yields each finding as soon as it is known. If there are no problems, ends with a trial run of the main job."""
    yield _python()
    numpy, _ = _package("NumPy", import_numpy, "problem", "`pip install 'numpy>=1.22'`")
    yield numpy
    mxnet, facts = _package("MXNet", import_mxnet, "problem", "`pip install --no-deps mxnet==1.9.1`", needs=numpy)
    yield mxnet
    yield _cores()
    yield from _gpus(facts.get("cuda", False))
    if numpy[0] == "ok":
        data = list(_data(data_dir))
    else:
        data = [("note", "the data sets were not checked, because this needs NumPy")]
    yield from data
    yield _space(Path.cwd(), "the current folder", "choose another folder with --out", "note")
    horovod, _ = _package("Horovod", import_horovod, "note", "`make horovod` to use --kvstore horovod", needs=mxnet)
    yield horovod
    if all(mark != "problem" for mark, _ in (numpy, mxnet, *data)):
        yield _trial(facts["gpus"])


def _python() -> Finding:
    line = f"Python {platform.python_version()} on {platform.system()}, {platform.machine()}"
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "note", f"{line}: this project is tested on x86-64 Linux only"
    if not (3, 9) <= sys.version_info[:2] <= (3, 13):
        return "note", f"{line}: this project is tested with Python 3.9 to 3.13; install one of them"
    return "ok", line


def _package(
    name: str, probe: Callable[[], Facts], mark: str, remedy: str, needs: Finding = ("ok", "")
) -> tuple[Finding, Facts]:
    """Check a Python package. Returns the finding and the facts that `probe` returns.

    probe: a function that imports the package. mark: the finding's mark if the import fails. remedy: the command that
    installs the package. needs: the finding about another package that this package requires.
    """
    if importlib.util.find_spec(name.lower()) is None:
        return (mark, f"{name} is not installed: run {remedy}"), {}
    if needs[0] != "ok":
        return ("note", f"{name} was not checked: see above"), {}
    try:
        facts = _in_child(f"importing {name}", probe)
    except UsageError as error:  # a setting is wrong, not the package
        return (mark, str(error)), {}
    except Error as error:
        advice = "" if "`" in str(error) else f"; try {remedy.replace('install', 'install --force-reinstall')}"
        return (mark, f"{error}{advice}"), {}
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


def import_horovod() -> Facts:
    engine.configure(2)
    import horovod
    import horovod.mxnet

    return {"line": f"Horovod {horovod.__version__}, built for this MXNet"}


def ask_driver() -> Facts:
    """Ask NVIDIA's driver for the newest CUDA version that it supports (11040 is 11.4; 0 means no driver) and for its
    GPUs, each as (name, major, minor); major.minor is the compute capability."""
    try:
        driver = ctypes.CDLL(cuda.DRIVER)
    except OSError:
        return {"cuda": 0, "gpus": []}
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status not in (0, NO_DEVICE):
        raise Error(f"the driver returned error {status}")
    return {"cuda": version.value, "gpus": [devices.gpu(index) for index in range(count.value)]}


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
    return "note", (
        f"{cores:g} of {allowed} cores (the control group's quota): {sharing}; with --gpus 1, set "
        f"OMP_NUM_THREADS={contexts}, because the default is {allowed} threads"
    )


def cgroup_cores(own: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The number of cores that this process's control group and its parents allow; None: no quota."""
    quotas: list[float] = []
    with suppress(OSError):
        group = own.read_text().rpartition("::/")[2].strip()
        # In a container, `group` may be the host's path; the root of `mount` is then this process's own group.
        for folder in (mount / group, *(mount / group).parents):
            with suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()  # "150000 100000" or "max 100000"
                quotas.append(int(quota) / int(period))
    with suppress(OSError, ValueError):  # cgroup version 1; in a container, its root is the container's group
        microseconds, every = (int((mount / f"cpu/cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        if microseconds > 0:
            quotas.append(microseconds / every)
    return min(quotas, default=None)


def _gpus(built_with_cuda: bool) -> Iterator[Finding]:
    """Yields findings about the GPUs that NVIDIA's driver reports. built_with_cuda: whether MXNet has CUDA support."""
    try:
        found = _in_child("asking NVIDIA's driver", ask_driver)
    except Error as error:
        yield "note", f"{error}: nvidia-smi may show details; reboot, or use --device cpu"
        return
    if not found["gpus"]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
        yield "ok", f"no NVIDIA GPU{hidden}: training runs on CPU contexts"
    for name, major, minor in found["gpus"]:
        gpu = f"GPU {name}, compute capability {major}.{minor}"
        if found["cuda"] < OLDEST_CUDA:
            yield "note", f"{gpu}: mxnet-cu112 needs driver 450.80.02 or later; install one, or use --device cpu"
        elif major not in devices.KERNELS:
            yield "note", f"{gpu}: MXNet 1.9.1 supports compute capability {devices.KERNELS_FOR}; use --device cpu"
        elif not built_with_cuda:
            yield "note", f"{gpu}: needs mxnet-cu112; run `pip uninstall -y mxnet`, then `pip install '.[cu112]'`"
        else:
            yield "ok", f"{gpu}: MXNet supports it"


def _data(data_dir: str | Path | None) -> Iterator[Finding]:
    try:
        from gluon_mgpu.training import datasets
    except Exception as error:  # a library that `datasets` needs is missing or broken
        yield "problem", f"data sets cannot be read ({errors.reason(error)}): reinstall gluon_mgpu"
        return
    cache_mark = "note"
    for name, mark in (("fashion-mnist", "problem"), ("mnist", "note")):  # the main job needs the first data set
        try:
            folder = datasets.find(name, data_dir)
            if folder:
                datasets.read(folder, name)
                yield "ok", f"{name} is in {folder}, with the expected SHA-256 checksums"
            else:
                yield "note", f"{name} is not on this machine: it will be downloaded when needed"
                if mark == "problem":
                    cache_mark = mark
        except Error as error:
            yield mark, str(error)
    cache = datasets.cache_folder("fashion-mnist").parent
    yield _space(cache, "the cache", "set XDG_CACHE_HOME to a folder with enough space", cache_mark)


def _space(folder: Path, name: str, remedy: str, mark: str) -> Finding:
    """Check the free space in a folder.

    mark: the finding's mark if the folder is not writable or lacks space for a data set.
    """
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return mark, f"{name}, {folder}, is not writable ({error.strerror}): {remedy}"
    line = f"{name}, {folder}, has {free / 1e9:.1f} GB free"
    if free <= DATA_SIZE:
        return mark, f"{line}, but a data set needs {DATA_SIZE / 1e9:.2f} GB: {remedy}"
    return "ok", line


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
