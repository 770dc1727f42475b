"""`make horovod`: builds Horovod for the MXNet of this environment, installs it there, and checks it.

The wheel stays in the user's cache, so that each Python takes the minutes once. It is Horovod's release with three
lines more, PATCHES below.
"""

import importlib.metadata
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from pathlib import Path

import click
import pooch
from tqdm import tqdm

from gluon_mgpu.commands import common as commands
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import checkpoint

HOROVOD = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"  # of its sources
MARK = "gluon.mgpu.2"  # the local part of our wheel's version: another one when PATCHES change
CONFIGURE = "import gluon_mgpu; gluon_mgpu.configure()\n"
PATCHES = (  # a file of the sources, where in it, what comes after that
    # Without it MXNet does not import beside today's NumPy: not in workers, and not in horovodrun, which asks it first.
    ("horovod/mxnet/__init__.py", "=====\n", CONFIGURE),
    # Workers would else listen on the address that their own host's name has there, in Debian's /etc/hosts 127.0.1.1.
    (
        "horovod/common/gloo/gloo_context.cc",
        "assert(global_context.IsEnabled());\n",
        "  gloo_iface_ = global_context.gloo_iface_;\n",
    ),
    # The thread that serves the sockets would else ask on and on, on the core that the one with the lock waits for.
    (
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n",
        "    usleep(50);\n",
    ),
)
# Horovod's sources ask for a CMake older than 4 and a setuptools older than 70.
TOOLS = "cmake >= 3.18, < 4", "setuptools >= 66.1, < 70", "wheel", "packaging"
FLAGS = {
    "HOROVOD_WITH_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_LOCAL_VERSION": MARK,
    "LDFLAGS": "-Wl,--strip-debug",  # 2 MB in place of 47
}
PIP = sys.executable, "-m", "pip", "--disable-pip-version-check"
HELD = signal.SIGINT, signal.SIGTERM
COMPILERS = "c++", "g++"
CHECK = f"""
{CONFIGURE}
import mxnet as mx, numpy as np, horovod.mxnet as hvd
hvd.init()
x = mx.nd.arange(1000) * (hvd.rank() + 1)
hvd.allreduce_(x, op=hvd.Sum, name="check")
assert hvd.size() == 2 and (x.asnumpy() == 3 * np.arange(1000)).all(), x
"""


@click.command(cls=commands.Command, examples="make horovod")
def build_horovod():
    """Build Horovod for the MXNet of this environment, install it there, and sum an array over two processes."""
    if version("horovod") != f"{HOROVOD}+{MARK}":
        install(wheel())
    click.echo(check())


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def wheel():
    """The path of a whole wheel for this Python and MXNet in the user's cache, which is built where it is not there."""
    mxnet = version("mxnet")
    if mxnet is None:
        raise Error("Horovod is built for MXNet's CPU wheel, which is not here: run `make install`")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    folder = Path(pooch.os_cache("gluon_mgpu")) / "wheels" / f"mxnet-{mxnet}"
    path = folder / f"horovod-{HOROVOD}+{MARK}-{tag}-{tag}-{platform}.whl"
    if not whole(path):
        build(path)
    return path


def whole(path):
    """Whether a wheel is there, with all its files as they were packed."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (FileNotFoundError, zipfile.BadZipFile, zlib.error):
        return False


def build(path):
    """Put the wheel into place, whole or not at all; raises Error, which names the log, where it does not build."""
    compiler = os.environ.get("CXX")
    missing = [] if any(map(shutil.which, [compiler] if compiler else COMPILERS)) else ["g++"]
    missing += [] if shutil.which("make") else ["make"]
    if missing:
        raise Error(
            f"Horovod is built from its sources, and {' and '.join(missing)} cannot be found: install them "
            f"(Debian, Ubuntu: apt-get install {' '.join(missing)})"
        )
    click.echo(f"building Horovod {HOROVOD}, which takes minutes; the wheel stays in {path.parent}", err=True)
    with tempfile.TemporaryDirectory(prefix="gluon_mgpu-horovod-") as folder:
        log = Path(folder) / "build.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            checkpoint.remove_half_written(path)
            with open(log, "wb") as file:
                built = compiled(Path(folder), file)
            checkpoint.write_whole(path, lambda file: file.write(built.read_bytes()))
            path.with_suffix(".log").unlink(missing_ok=True)
        except subprocess.CalledProcessError:
            kept = shutil.copy(log, path.with_suffix(".log"))
            raise Error(f"Horovod does not build: {telling(log)} (the whole log: {kept})") from None
        except OSError as error:
            raise Error(f"{error}: TMPDIR and XDG_CACHE_HOME name other places") from error


def compiled(folder, log):
    """Compile Horovod's release in `folder` and return the path of its wheel."""
    tools = folder / "tools"
    run([*PIP, "install", "--target", str(tools), *TOOLS], log)
    # The build imports MXNet, in processes of its own; these start so, and with these tools.
    (tools / "sitecustomize.py").write_text(CONFIGURE)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tools),
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "TMPDIR": str(folder),  # so that nothing is left of it
    }
    wanted = folder / "requirements.txt"
    wanted.write_text(f"horovod=={HOROVOD} --hash=sha256:{SHA256}\n")
    options = "--use-pep517", "--no-build-isolation", "--no-deps", "--no-cache-dir"
    fetch = "download", *options, "--no-binary", "horovod", "--dest", str(folder), "--requirement", str(wanted)
    run([*PIP, *fetch], log, environment)
    source = folder / f"horovod-{HOROVOD}"
    shutil.unpack_archive(f"{source}.tar.gz", folder)
    for name, place, line in PATCHES:
        file = source / name
        before, here, after = file.read_text().partition(place)
        file.write_text(before + here + line + after)
    to_wheel = "wheel", *options, "--verbose", "--wheel-dir", str(folder), str(source)
    run([*PIP, *to_wheel], log, {**environment, **FLAGS}, progress=True)
    (built,) = folder.glob("*.whl")
    return built


def run(command, log, environment=None, progress=False):
    """Run a command, its output into `log`; it ends with us. On a terminal, `make`'s percentage is shown."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    try:
        with tqdm(total=100, unit="%", desc="compiling", leave=False, disable=None if progress else True) as bar:
            for line in process.stdout:
                log.write(line)
                percent = re.match(rb"\s*\[ *(\d+)%\]", line)
                if percent:
                    bar.update(int(percent[1]) - bar.n)
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # pip, CMake, make and the compilers
        process.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def telling(log):
    """The line of a build's log that says what is wrong: its first error, else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("CMake Error"):  # what is wrong stands on the next lines
            return " ".join(["CMake:", *itertools.takewhile(lambda x: "Call Stack" not in x, lines[number + 1 :][:4])])
        if re.search(r"\berror: |No space left", line, re.IGNORECASE):
            return line
    return lines[-1] if lines else "it said nothing"


def install(path):
    """Install the wheel and what it depends on. All is fetched first, so that the installing takes a second."""
    with tempfile.TemporaryDirectory(prefix="gluon_mgpu-horovod-") as folder:
        pip("download", "--dest", folder, str(path))
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # Ctrl-C waits for that second: nothing is half-installed
        try:
            pip("install", "--no-index", "--find-links", folder, str(path))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def pip(*arguments):
    done = subprocess.run([*PIP, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["it does not say why"]
        raise Error(f"pip {arguments[0]} of Horovod failed: {lines[-1]}")


def check():
    """Sum an array over two processes and return a line that says so; raises Error where they do not."""
    horovodrun = Path(sysconfig.get_path("scripts")) / "horovodrun"
    two = [str(horovodrun), "--gloo", "-np", "2", "-H", "localhost:2", sys.executable, "-c", CHECK]
    try:
        done = subprocess.run(two, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Error(f"Horovod {HOROVOD} is installed, and does not work: {error}") from error
    if done.returncode:
        wrong = re.search(r"^(\[\d\]<stderr>:)?([\w.]*Error: .*)", done.stderr, re.MULTILINE)
        why = wrong[2] if wrong else f"horovodrun ended with status {done.returncode}"
        raise Error(f"Horovod {HOROVOD} is installed, and does not work: {why}")
    return f"Horovod {HOROVOD} with MXNet {version('mxnet')}: two processes summed an array over gloo"


if __name__ == "__main__":
    build_horovod()
