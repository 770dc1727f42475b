"""What this machine can run, a line a finding, with what to do.

It must start where NumPy or MXNet are missing or broken: so the standard library and click are all that it imports, and
what could fail, crash or hang is done in processes of their own, each with a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import click

from gluon_mgpu.commands.common import common as commands
from gluon_mgpu.runtime import cuda, devices, engine
from gluon_mgpu.runtime.errors import Error

MAIN_JOB = "train --impl scratch --gpus 2"
Finding = tuple[str, str]  # a mark, and the line
COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}  # a problem: the main job cannot run
PYTHONS = (3, 9), (3, 13)  # the oldest and the newest that the suite was run with
OLDEST_NUMPY = (1, 22)
OLDEST_DRIVER = (450, 80, 2)  # for CUDA 11.x: NVIDIA's table of minor version compatibility
SECONDS = 120  # for a process that imports MXNet, on a busy machine
SMI_SECONDS = 20  # nvidia-smi hangs where the driver does
DATA_SIZE = 31 << 20  # what a data set's download takes at most, in bytes

# NumPy's own error is a page of advice; what went wrong is the first of the errors that led to it.
NUMPY = """
try:
    import numpy
except Exception as error:
    while error.__context__:
        error = error.__context__
    raise SystemExit(f"{type(error).__name__}: {error}")
print(numpy.__version__)
"""
MXNET = """
import json, gluon_mgpu
gluon_mgpu.configure(2)
import mxnet
features = [name for name, feature in mxnet.runtime.Features().items() if feature.enabled]
print(json.dumps([mxnet.__version__, features, mxnet.context.num_gpus()]))
"""
HOROVOD = """
import gluon_mgpu
gluon_mgpu.configure(2)
import horovod, horovod.mxnet
print(horovod.__version__)
"""
TRIAL = "--epochs=1 --dataset=synthetic --limit=512 --seed=1".split()


@click.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu doctor
        gluon-mgpu doctor --data-dir data
    """,
)
@commands.data_dir
@click.pass_context
def doctor(context: click.Context, data_dir: str | None) -> None:
    """What this machine can run, and what to do about the rest. A line a finding: Python, NumPy, MXNet and the
    libraries that it needs, cores, GPUs, data, free space, Horovod. At last it trains for a moment on 2 devices. Exit
    status 1 when the main job, train --impl scratch --gpus 2, could not run."""
    problems = 0
    for mark, finding in findings(data_dir):
        problems += mark == "problem"
        click.echo(f"{click.style(f'{mark:9}', fg=COLOURS[mark])}{finding}")
    click.echo(
        f"cannot run {MAIN_JOB}: {problems} problem{'s'[: problems > 1]} above" if problems else f"can run {MAIN_JOB}"
    )
    context.exit(1 if problems else 0)


def findings(data_dir: str | Path | None = None) -> Iterator[Finding]:
    """Yields (mark, finding): "ok", "note" for what the main job does without, "problem" for what it needs."""
    found = []
    for check in _checks(data_dir):
        found.append(check)
        yield check
    if all(mark != "problem" for mark, _ in found):
        yield _trial()


def _checks(data_dir: str | Path | None) -> Iterator[Finding]:
    yield _python()
    numpy = _numpy()
    yield numpy
    mxnet, features, gpus = _mxnet(numpy[0] != "problem")
    yield mxnet
    yield _cores()
    yield from _gpus("CUDA" in features, gpus)
    if numpy[0] == "problem":
        yield "note", "data was not looked for, which needs NumPy"
    else:
        yield from _data(data_dir)
    yield _space(Path.cwd(), "the current folder", "--out must name another folder", "note")
    yield _horovod(mxnet[0] == "ok")


def _python() -> Finding:
    version = f"Python {platform.python_version()} on {platform.system()}, {platform.machine()}"
    oldest, newest = PYTHONS
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "note", f"{version}: tried on x86-64 Linux only"
    if not oldest <= sys.version_info[:2] <= newest:
        return "note", f"{version}: tried with 3.{oldest[1]} to 3.{newest[1]} only; install one of these"
    return "ok", version


def _numpy() -> Finding:
    if importlib.util.find_spec("numpy") is None:
        return "problem", "NumPy is not installed: `pip install 'numpy>=1.22'`"
    version, why = _python_says(NUMPY)
    if why:
        remedy = engine.missing(why) or "`pip install --force-reinstall 'numpy>=1.22'` may help"
        return "problem", f"NumPy cannot be imported ({why}): {remedy}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_NUMPY:
        return "note", f"NumPy {version}: tried from 1.22 on; `pip install --upgrade numpy`"
    return "ok", f"NumPy {version}"


def _mxnet(numpy: bool) -> tuple[Finding, list[str], int]:
    """(finding, features, number of GPUs that it sees). numpy: it can be imported."""
    if importlib.util.find_spec("mxnet") is None:
        remedy = "`make install`, or `pip install --no-deps mxnet==1.9.1`"
        return ("problem", f"MXNet is not installed: {remedy}"), [], 0
    wheels = " and ".join(f"{name} {version}" for name, version in cuda.wheels().items()) or "from no wheel"
    try:
        cuda.refuse_two_wheels()
    except Error as error:
        return ("problem", str(error)), [], 0
    if not numpy:
        return ("note", f"MXNet ({wheels}) was not tried, which needs NumPy"), [], 0
    said, why = _python_says(MXNET)
    if why:
        if why.startswith("gluon_mgpu."):  # an error of our own says what to do
            remedy = why.partition(": ")[2]
        else:
            name = next(iter(cuda.wheels()), "mxnet")
            remedy = engine.missing(why) or f"{why}: `pip install --force-reinstall {name}==1.9.1` may help"
        return ("problem", f"MXNet ({wheels}) cannot be imported: {remedy}"), [], 0
    version, features, gpus = json.loads(said)
    built = f"with CUDA, which sees {gpus} GPU{'s'[: gpus != 1]}" if "CUDA" in features else "without CUDA"
    return ("ok", f"MXNet {version} ({wheels}) imports, built {built}"), features, gpus


def _cores() -> Finding:
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup_cores()
    if quota is None or quota >= allowed:
        return (
            "ok",
            f"{allowed} core{'s'[: allowed != 1]} for this process: --gpus {allowed} has a CPU context for each",
        )
    contexts = max(1, int(quota))
    return "note", (
        f"{quota:g} of {allowed} cores by the control group's quota: --gpus {contexts} has a CPU context for each; "
        f"before --gpus 1, set OMP_NUM_THREADS={contexts}, or it starts {allowed} threads"
    )


def cgroup_cores(own: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """How many cores the quota of this process's control group leaves it, or None without one. Version 1 or 2."""
    quotas = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = mount / "cpu" if controllers else mount
            folder = root / path.lstrip("/")
            # A group is held to its parents' quotas too. In a container the path may be the host's: the root is ours.
            quotas += [_quota(at) for at in (folder, *folder.parents) if root in (at, *at.parents)]
    return min((quota for quota in quotas if quota), default=None)


def _quota(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()  # "150000 100000", or "max 100000"
        else:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text() for what in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _gpus(cuda: bool, seen: int) -> Iterator[Finding]:
    """What nvidia-smi says of each GPU. cuda: MXNet is built with it, and sees so many."""
    smi = shutil.which("nvidia-smi")
    if not smi:
        yield "ok", "no NVIDIA GPU (there is no nvidia-smi): training runs on CPU contexts"
        return
    ask = [smi, "--format=csv,noheader", "--query-gpu=name,compute_cap,driver_version"]
    status, said, _ = _run(ask, SMI_SECONDS)
    if status and "not a valid field" in said:  # drivers before 510
        status, said, _ = _run([*ask[:2], "--query-gpu=name,driver_version"], SMI_SECONDS)
    if status is None:
        yield (
            "note",
            (
                f"nvidia-smi gives no answer within {SMI_SECONDS} s: the driver hangs, which a reboot may end; "
                "--device cpu trains without GPUs"
            ),
        )
    elif status:
        why = (said.strip().splitlines() or [f"exit status {status}"])[0]
        yield "note", f"nvidia-smi fails ({why.rstrip('. ')}): --device cpu trains without GPUs"
    else:
        for line in said.splitlines():
            yield _gpu(line, cuda)
        if cuda and not seen:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hidden = "" if visible is None else f", CUDA_VISIBLE_DEVICES is {visible!r}"
            yield "note", f"MXNet sees no GPU all the same{hidden}: training runs on CPU contexts"


def _gpu(line: str, cuda: bool) -> Finding:
    """The finding for a line "NAME, COMPUTE CAPABILITY, DRIVER VERSION", or without the capability."""
    found = re.fullmatch(r"(.+?)(?:, (?:(\d+)\.(\d+)|[^,]*))?, ([\d.]+)", line.strip())
    if not found:
        return "note", f"nvidia-smi says {line.strip()!r}"
    name, major, minor, driver = found.groups()
    what = f"GPU {name}, compute capability {f'{major}.{minor}' if major else 'not told'}, driver {driver}"
    if tuple(int(part) for part in driver.split(".")) < OLDEST_DRIVER:
        return "note", f"{what}: CUDA 11 needs driver 450.80.02 or later; install one, or train with --device cpu"
    if major is None:
        return "note", f"{what}: MXNet 1.9.1 has kernels for {devices.KERNELS_FOR}; train.py asks the driver for it"
    if int(major) not in devices.KERNELS:
        return "note", f"{what}: MXNet 1.9.1 has kernels for {devices.KERNELS_FOR} only; train with --device cpu"
    if not cuda:
        remedy = "`pip uninstall -y mxnet`, then `pip install '.[cu112]'`"
        return "note", f"{what}: mxnet-cu112 has kernels for it, and this MXNet is built without CUDA: {remedy}"
    return "ok", f"{what}: MXNet has kernels for it"


def _data(data_dir: str | Path | None) -> Iterator[Finding]:
    try:
        from gluon_mgpu.training import datasets
    except Exception as error:  # a library that it needs is missing or broken
        yield (
            "problem",
            f"what reads data cannot be imported ({type(error).__name__}: {error}): install gluon_mgpu again",
        )
        return
    missing = []
    for name, grave in (("fashion-mnist", "problem"), ("mnist", "note")):  # the main job's, and another
        try:
            folder = datasets.find(name, data_dir)
            if folder:
                datasets.read(folder, name)
        except Error as error:
            yield grave, str(error)
            continue
        if folder:
            yield "ok", f"{name} is in {folder}, and its SHA-256 is right"
        else:
            missing.append(name)
            package = datasets.PACKAGES.get(name)
            ways = f", or taken from Debian's package {package}" if package else ""
            yield "note", f"{name} was not found: it is downloaded when training first asks for it{ways}"
    grave = "problem" if "fashion-mnist" in missing else "note"
    remedy = "set XDG_CACHE_HOME to a folder with room"
    yield _space(datasets.cache_folder("fashion-mnist").parent, "the cache", remedy, grave)


def _space(folder: Path, what: str, remedy: str, grave: str) -> Finding:
    """What room a folder has; `grave` where it has too little for a data set, or cannot be written."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        return grave, f"{what}, {folder}, cannot be written ({error.strerror}): {remedy}"
    room = f"{what}, {folder}, has {free / 1e9:.1f} GB free"
    return (
        ("ok", room) if free > DATA_SIZE else (grave, f"{room}, and a data set needs {DATA_SIZE / 1e9:.2f}: {remedy}")
    )


def _horovod(mxnet: bool) -> Finding:
    """mxnet: it can be imported."""
    if importlib.util.find_spec("horovod") is None:
        tools = [] if shutil.which("c++") or shutil.which("g++") else ["g++"]
        tools += [] if shutil.which("make") else ["make"]
        first = f", after `apt install {' '.join(tools)}`" if tools else ""
        return "note", f"Horovod is not installed, which only --kvstore horovod needs: `make horovod`{first}"
    if not mxnet:
        return "note", "Horovod is installed; it was not tried, as MXNet cannot be imported"
    version, why = _python_says(HOROVOD)
    if why:
        return "note", f"Horovod cannot be imported for this MXNet ({why}): `make horovod` builds it anew"
    return "ok", f"Horovod {version}, built for this MXNet"


def _trial() -> Finding:
    """The main job in small: 512 synthetic examples."""
    status, said, errors = _run([sys.executable, "-m", "gluon_mgpu", *MAIN_JOB.split(), *TRIAL], SECONDS)
    if status:
        return "problem", f"a trial of {MAIN_JOB} fails: {_reason(status, errors)}"
    if status is None:
        return "problem", f"a trial of {MAIN_JOB} does not end within {SECONDS} s: `gluon-mgpu {MAIN_JOB}` shows where"
    return "ok", f"a trial with 512 synthetic examples ends well, {said.splitlines()[0]}"


def _python_says(code: str) -> tuple[str, str]:
    """(the last line that the code prints, ""), or ("", why it fails); in a Python of its own."""
    status, said, errors = _run([sys.executable, "-c", code], SECONDS)
    if status == 0:
        return said.splitlines()[-1], ""
    return "", f"does not end within {SECONDS} s" if status is None else _reason(status, errors)


def _reason(status: int, errors: str) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    lines = errors.strip().splitlines()
    ours = [line for line in lines if line.startswith("error: ")]
    return (ours or lines or [f"exit status {status}"])[-1].removeprefix("error: ")


def _run(command: Sequence[str], seconds: float) -> tuple[int | None, str, str]:
    """(exit status, standard output, standard error) of a process, with None for the status where time ran out.

    It and all that it started end with this call, on Ctrl-C too.
    """
    alone = {k: v for k, v in os.environ.items() if not k.startswith(("DMLC_", "HOROVOD_"))}  # no worker of a run
    child = subprocess.Popen(
        command,
        env=alone,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, errors = child.communicate(timeout=seconds)
        return child.returncode, said, errors
    except subprocess.TimeoutExpired:
        return None, "", ""
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if child.returncode is None:
            with suppress(subprocess.TimeoutExpired):  # one that a driver holds does not even end then
                child.communicate(timeout=1)
