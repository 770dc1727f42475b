"""`gluon-mgpu doctor`: what this machine can run, one line per finding, and how to fix the rest.

It must start if NumPy or MXNet are missing or broken. So it imports only the standard library and click at first, and
runs everything that could fail, crash or hang in a process of its own, with a time limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import click

from gluon_mgpu.commands import common
from gluon_mgpu.runtime import cuda, devices, engine, subprocesses
from gluon_mgpu.runtime.errors import Error

MAIN_JOB = "train --impl scratch --gpus 2"
Finding = tuple[str, str]  # (mark, line). "problem": the main job cannot run; "note": it can, but something else cannot
COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
PYTHONS = (3, 9), (3, 13)  # the oldest and the newest version that the test suite runs with
OLDEST_NUMPY = (1, 22)
OLDEST_DRIVER = (450, 80, 2)  # for CUDA 11, from NVIDIA's table of minor version compatibility
SECONDS = 120  # for a process that imports MXNet, on a busy machine
SMI_SECONDS = 20  # nvidia-smi hangs if the driver hangs
DATA_SIZE = 31 << 20  # bytes, the size of the largest download

# NumPy's own error is a page of advice; the first error in the chain is the cause.
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
TRIAL = ("--epochs=1", "--dataset=synthetic", "--limit=512", "--seed=1")


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu doctor
        gluon-mgpu doctor --data-dir data
    """,
)
@common.data_dir
@click.pass_context
def doctor(context: click.Context, data_dir: str | None) -> None:
    """Check what this machine can run. Prints one line per finding: Python, NumPy, MXNet and its libraries, cores,
    GPUs, data, free space and Horovod. Then it trains for a moment on 2 devices. Exit status 1 if the main job,
    train --impl scratch --gpus 2, cannot run."""
    problems = 0
    for mark, line in findings(data_dir):
        problems += mark == "problem"
        click.echo(f"{click.style(f'{mark:9}', fg=COLOURS[mark])}{line}")
    if problems:
        click.echo(f"cannot run {MAIN_JOB}: {problems} problem{'s'[: problems > 1]} above")
        context.exit(1)
    click.echo(f"can run {MAIN_JOB}")


def findings(data_dir: str | Path | None = None) -> Iterator[Finding]:
    """Yields each finding as soon as it is known. The trial run of the main job comes last, if there is no problem."""
    yield _python()
    numpy = _numpy()
    yield numpy
    mxnet, features, gpus = _mxnet(numpy[0] != "problem")
    yield mxnet
    yield _cores()
    yield from _gpus("CUDA" in features, gpus)
    if numpy[0] == "problem":
        data = [("note", "the data sets were not checked, because that needs NumPy")]
    else:
        data = list(_data(data_dir))
    yield from data
    yield _space(Path.cwd(), "the current folder", "choose another folder with --out", "note")
    yield _horovod(mxnet[0] == "ok")
    if all(mark != "problem" for mark, _ in (numpy, mxnet, *data)):
        yield _trial(gpus)


def _python() -> Finding:
    version = f"Python {platform.python_version()} on {platform.system()}, {platform.machine()}"
    oldest, newest = PYTHONS
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "note", f"{version}: this project is tested on x86-64 Linux only"
    if not oldest <= sys.version_info[:2] <= newest:
        return "note", f"{version}: this project is tested with Python 3.{oldest[1]} to 3.{newest[1]}; install one"
    return "ok", version


def _numpy() -> Finding:
    if importlib.util.find_spec("numpy") is None:
        return "problem", "NumPy is not installed: run `pip install 'numpy>=1.22'`"
    version, reason = _output(NUMPY)
    if reason:
        remedy = engine.missing(reason) or "`pip install --force-reinstall 'numpy>=1.22'` may help"
        return "problem", f"NumPy cannot be imported ({reason}): {remedy}"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST_NUMPY:
        return "note", f"NumPy {version}: this project is tested with 1.22 or later; run `pip install --upgrade numpy`"
    return "ok", f"NumPy {version}"


def _mxnet(numpy: bool) -> tuple[Finding, list[str], int]:
    """(finding, features, number of GPUs that MXNet sees). numpy: whether NumPy can be imported."""
    if importlib.util.find_spec("mxnet") is None:
        remedy = "run `make install`, or `pip install --no-deps mxnet==1.9.1`"
        return ("problem", f"MXNet is not installed: {remedy}"), [], 0
    wheels = " and ".join(f"{name} {version}" for name, version in cuda.wheels().items()) or "not from a wheel"
    try:
        cuda.refuse_two_wheels()
    except Error as error:
        return ("problem", str(error)), [], 0
    if not numpy:
        return ("note", f"MXNet ({wheels}) was not checked, because that needs NumPy"), [], 0
    output, reason = _output(MXNET)
    if reason:
        own = re.match(r"gluon_mgpu\.[\w.]+: (.*)", reason)  # one of our errors, which says what to do
        if own:
            remedy = own[1]
        else:
            name = next(iter(cuda.wheels()), "mxnet")
            remedy = engine.missing(reason) or f"{reason}: `pip install --force-reinstall {name}==1.9.1` may help"
        return ("problem", f"MXNet ({wheels}) cannot be imported: {remedy}"), [], 0
    version, features, gpus = json.loads(output)
    built = f"with CUDA; it sees {gpus} GPU{'s'[: gpus != 1]}" if "CUDA" in features else "without CUDA"
    return ("ok", f"MXNet {version} ({wheels}), built {built}"), features, gpus


def _cores() -> Finding:
    allowed = len(os.sched_getaffinity(0))
    quota = cgroup_cores()
    if quota is None or quota >= allowed:
        return "ok", f"{allowed} core{'s'[: allowed != 1]}: up to --gpus {allowed}, each CPU context has its own core"
    contexts = max(1, int(quota))
    return "note", (
        f"{quota:g} of {allowed} cores, the control group's quota: up to --gpus {contexts}, each CPU context has its "
        f"own core; set OMP_NUM_THREADS={contexts} for --gpus 1, which otherwise starts {allowed} threads"
    )


def cgroup_cores(own: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The quota of this process's control group (version 1 or 2) in cores; None without a quota."""
    quotas = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = mount / "cpu" if controllers else mount
            folder = root / path.lstrip("/")
            # The quotas of parent groups apply too. In a container, `path` may be the host's; the root is then ours.
            quotas += [_quota(at) for at in (folder, *folder.parents) if root in (at, *at.parents)]
    return min((quota for quota in quotas if quota), default=None)


def _quota(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()  # "150000 100000" or "max 100000"
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _gpus(cuda: bool, seen: int) -> Iterator[Finding]:
    """What nvidia-smi reports about each GPU. cuda: MXNet is built with CUDA. seen: the number of GPUs MXNet sees."""
    smi = shutil.which("nvidia-smi")
    if not smi:
        yield "ok", "no NVIDIA GPU (nvidia-smi is not installed): training runs on CPU contexts"
        return
    query = [smi, "--format=csv,noheader", "--query-gpu=name,compute_cap,driver_version"]
    status, out, _ = _run(query, SMI_SECONDS)
    if status and "not a valid field" in out:  # drivers before 510
        status, out, _ = _run([*query[:2], "--query-gpu=name,driver_version"], SMI_SECONDS)
    if status is None:
        advice = "reboot, or use --device cpu"
        yield "note", f"nvidia-smi does not answer within {SMI_SECONDS} s, so the driver hangs: {advice}"
    elif status:
        reason = (out.strip().splitlines() or [f"exit status {status}"])[0]
        yield "note", f"nvidia-smi fails ({reason.rstrip('. ')}): use --device cpu"
    else:
        for line in out.splitlines():
            yield _gpu(line, cuda)
        if cuda and not seen:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
            yield "note", f"MXNet does not see the GPUs{hidden}: training runs on CPU contexts"


def _gpu(line: str, cuda: bool) -> Finding:
    """The finding for a line "NAME, COMPUTE CAPABILITY, DRIVER VERSION", or one without the capability."""
    found = re.fullmatch(r"(.+?)(?:, (?:(\d+)\.(\d+)|[^,]*))?, ([\d.]+)", line.strip())
    if not found:
        return "note", f"nvidia-smi reports {line.strip()!r}"
    name, major, minor, driver = found.groups()
    gpu = f"GPU {name}, compute capability {f'{major}.{minor}' if major else 'unknown'}, driver {driver}"
    if tuple(int(part) for part in driver.split(".")) < OLDEST_DRIVER:
        return "note", f"{gpu}: CUDA 11 needs driver 450.80.02 or later; install one, or use --device cpu"
    if major is None:
        return "note", f"{gpu}: MXNet 1.9.1 supports compute capability {devices.KERNELS_FOR}; training will check it"
    if int(major) not in devices.KERNELS:
        return "note", f"{gpu}: MXNet 1.9.1 supports compute capability {devices.KERNELS_FOR} only; use --device cpu"
    if not cuda:
        remedy = "`pip uninstall -y mxnet`, then `pip install '.[cu112]'`"
        return "note", f"{gpu}: mxnet-cu112 supports it, but the installed MXNet is built without CUDA; run {remedy}"
    return "ok", f"{gpu}: MXNet supports it"


def _data(data_dir: str | Path | None) -> Iterator[Finding]:
    try:
        from gluon_mgpu.training import datasets
    except Exception as error:  # a library that it needs is missing or broken
        yield "problem", f"data sets cannot be read ({type(error).__name__}: {error}): install gluon_mgpu again"
        return
    missing = []
    for name, grave in (("fashion-mnist", "problem"), ("mnist", "note")):  # the main job needs the first one
        try:
            folder = datasets.find(name, data_dir)
            if folder:
                datasets.read(folder, name)
        except Error as error:
            yield grave, str(error).replace("data_dir=", "--data-dir ")
            continue
        if folder:
            yield "ok", f"{name} is in {folder}, with the expected SHA-256"
        else:
            missing.append(name)
            package = datasets.PACKAGES.get(name)
            alternative = f" or taken from Debian's package {package}" if package else ""
            yield "note", f"{name} is not on this machine: it will be downloaded when needed{alternative}"
    grave = "problem" if "fashion-mnist" in missing else "note"
    remedy = "set XDG_CACHE_HOME to a folder with enough space"
    yield _space(datasets.cache_folder("fashion-mnist").parent, "the cache", remedy, grave)


def _space(folder: Path, name: str, remedy: str, grave: str) -> Finding:
    """The free space of a folder. grave: the mark if it is too small for a data set or cannot be written."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        return grave, f"{name}, {folder}, is not writable ({error.strerror}): {remedy}"
    line = f"{name}, {folder}, has {free / 1e9:.1f} GB free"
    if free <= DATA_SIZE:
        return grave, f"{line}, but a data set needs {DATA_SIZE / 1e9:.2f} GB: {remedy}"
    return "ok", line


def _horovod(mxnet: bool) -> Finding:
    """mxnet: whether MXNet can be imported."""
    if importlib.util.find_spec("horovod") is None:
        tools = [] if shutil.which("c++") or shutil.which("g++") else ["g++"]
        tools += [] if shutil.which("make") else ["make"]
        first = f"`apt install {' '.join(tools)}`, then " if tools else ""
        return "note", f"Horovod is not installed; only --kvstore horovod needs it: run {first}`make horovod`"
    if not mxnet:
        return "note", "Horovod was not checked, because that needs MXNet"
    version, reason = _output(HOROVOD)
    if reason:
        return "note", f"Horovod cannot be imported with this MXNet ({reason}): run `make horovod` to build it again"
    return "ok", f"Horovod {version}, built for this MXNet"


def _trial(gpus: int) -> Finding:
    """A short run of the main job, with 512 synthetic examples. gpus: the number of GPUs that MXNet sees."""
    device = "--device=auto" if gpus else "--device=cpu"  # without a notice that there is no GPU
    finished = _run([sys.executable, "-m", "gluon_mgpu", *MAIN_JOB.split(), device, *TRIAL], SECONDS)
    try:
        subprocesses.check(f"a trial of {MAIN_JOB}", finished, f"run `gluon-mgpu {MAIN_JOB}` to see where it hangs")
    except Error as error:
        return "problem", str(error)
    return "ok", f"a trial with 512 synthetic examples succeeded, {finished.out.splitlines()[0]}"


def _output(code: str) -> tuple[str, str]:
    """(the last line that a Python program prints, ""), or ("", the reason why it failed)."""
    status, out, err = _run([sys.executable, "-c", code], SECONDS)
    if status == 0:
        return out.splitlines()[-1], ""
    if status is None:
        return "", f"does not finish within {SECONDS} s"
    if status < 0:
        return "", f"killed by {signal.Signals(-status).name}"
    return "", (err.strip().splitlines() or [f"exit status {status}"])[-1]


def _run(command: Sequence[str], seconds: float) -> subprocesses.Finished:
    environment = engine.users_environment()
    launched = [name for name in environment if name.startswith(("DMLC_", "HOROVOD_"))]
    for name in launched:  # doctor may run in the environment of a worker or a server; its children must not be one
        del environment[name]
    return subprocesses.run(command, env=environment, seconds=seconds)
