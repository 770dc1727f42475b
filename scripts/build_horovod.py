"""`make horovod`: build Horovod for this environment's MXNet, install it, and check it.

The wheel is kept in the user's cache, so it is built once per Python and MXNet version. It contains a Horovod release
with PATCHES applied.
"""

import importlib.metadata
import itertools
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import zipfile
import zlib
from pathlib import Path

import click
import platformdirs
from tqdm import tqdm

from gluon_mgpu.commands import common
from gluon_mgpu.runtime import files, subprocesses
from gluon_mgpu.runtime.errors import Error

HOROVOD = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"  # hash of the source archive
MARK = "gluon.mgpu.2"  # local version of the patched wheel; change it when PATCHES change
CONFIGURE = "import gluon_mgpu; gluon_mgpu.configure()\n"
PATCHES = (  # (source file, a string in it, the line to insert after that string)
    # Without this, neither workers nor horovodrun can import MXNet with a current NumPy.
    ("horovod/mxnet/__init__.py", "=====\n", CONFIGURE),
    # Without this, workers listen on the address that their host name resolves to: on Debian, 127.0.1.1.
    (
        "horovod/common/gloo/gloo_context.cc",
        "assert(global_context.IsEnabled());\n",
        "  gloo_iface_ = global_context.gloo_iface_;\n",
    ),
    # Without this, the socket thread spins on the core that the thread that holds the lock needs.
    (
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "std::unique_lock<std::mutex> lock(m_, std::try_to_lock);\n  if (!lock) {\n",
        "    usleep(50);\n",
    ),
)
TOOLS = "cmake >= 3.18, < 4", "setuptools >= 66.1, < 70", "wheel", "packaging"  # newer versions cannot build Horovod
FLAGS = {
    "HOROVOD_WITH_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_LOCAL_VERSION": MARK,
    "LDFLAGS": "-Wl,--strip-debug",  # reduces the library from 47 MB to 2 MB
}
PIP = sys.executable, "-m", "pip", "--disable-pip-version-check"
COMPILERS = "c++", "g++"
CHECK = f"""
{CONFIGURE}
import mxnet as mx, numpy as np, horovod.mxnet as hvd
hvd.init()
x = mx.nd.arange(1000) * (hvd.rank() + 1)
hvd.allreduce_(x, op=hvd.Sum, name="check")
assert hvd.size() == 2 and (x.asnumpy() == 3 * np.arange(1000)).all(), x
"""


@click.command(cls=common.Command, examples="make horovod")
def build_horovod():
    """Build Horovod for this environment's MXNet, install it, and check that two processes can sum an array."""
    if version("horovod") != f"{HOROVOD}+{MARK}":
        install(wheel())
    click.echo(check())


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def wheel():
    """Returns the path of the cached wheel for this Python and MXNet. Builds the wheel if it is missing or damaged."""
    mxnet = version("mxnet")
    if mxnet is None:
        raise Error("Horovod needs MXNet's CPU wheel, which is not installed: run `make install`")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    folder = platformdirs.user_cache_path("gluon_mgpu") / "wheels" / f"mxnet-{mxnet}"
    path = folder / f"horovod-{HOROVOD}+{MARK}-{tag}-{tag}-{platform}.whl"
    if not is_whole(path):
        build(path)
    return path


def is_whole(path):
    """Whether the wheel exists and all files in it match their checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (FileNotFoundError, zipfile.BadZipFile, zlib.error):
        return False


def build(path):
    """Build the wheel and write it atomically. Raises Error, with the log's path, if the build fails."""
    compiler = os.environ.get("CXX")
    missing = [] if any(map(shutil.which, [compiler] if compiler else COMPILERS)) else ["g++"]
    missing += [] if shutil.which("make") else ["make"]
    if missing:
        raise Error(
            f"Horovod is built from source, which needs {' and '.join(missing)}: install "
            f"{'it' if len(missing) == 1 else 'them'} (Debian, Ubuntu: apt-get install {' '.join(missing)})"
        )
    click.echo(f"building Horovod {HOROVOD}, which takes a few minutes; the wheel is kept in {path.parent}", err=True)
    log = path.with_suffix(".log")
    with tempfile.TemporaryDirectory(prefix="gluon_mgpu-horovod-") as folder:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.remove_partial(path)
            built = compiled(Path(folder), log)
            files.write_whole(path, lambda file: file.write(built.read_bytes()))
            log.unlink(missing_ok=True)
        except OSError as error:
            raise Error(f"{error}: set TMPDIR or XDG_CACHE_HOME to use another folder") from error


def compiled(folder, log):
    """Compile a release of Horovod in `folder`. Returns the path of the wheel."""
    tools = folder / "tools"
    step(log, [*PIP, "install", "--target", str(tools), *TOOLS])
    (tools / "sitecustomize.py").write_text(CONFIGURE)  # the build imports MXNet in child processes
    environment = {
        **os.environ,
        "PYTHONPATH": str(tools),
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "TMPDIR": str(folder),
    }
    wanted = folder / "requirements.txt"
    wanted.write_text(f"horovod=={HOROVOD} --hash=sha256:{SHA256}\n")
    options = "--use-pep517", "--no-build-isolation", "--no-deps", "--no-cache-dir"
    fetch = "download", *options, "--no-binary", "horovod", "--dest", str(folder), "--requirement", str(wanted)
    step(log, [*PIP, *fetch], environment)
    source = folder / f"horovod-{HOROVOD}"
    shutil.unpack_archive(f"{source}.tar.gz", folder)
    for name, place, line in PATCHES:
        file = source / name
        before, found, after = file.read_text().partition(place)
        file.write_text(before + found + line + after)
    to_wheel = "wheel", *options, "--verbose", "--wheel-dir", str(folder), str(source)
    with tqdm(total=100, unit="%", desc="compiling", leave=False, disable=None) as bar:

        def show(line):
            percent = re.match(r"\s*\[ *(\d+)%\]", line)  # progress that make prints
            if percent:
                bar.update(int(percent[1]) - bar.n)

        step(log, [*PIP, *to_wheel], {**environment, **FLAGS}, show)
    (built,) = folder.glob("*.whl")
    return built


def step(log, command, environment=None, on_line=None):
    """Run a command. If it fails, write its output to `log` and raise Error."""
    finished = subprocesses.run(command, env=environment, on_line=on_line)
    if finished.status:
        output = finished.out + finished.err
        log.write_text(output)
        raise Error(f"Horovod cannot be built: {cause(output)} (see {log})")


def cause(output):
    """The first error in a build's output; if there is none, the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if line.startswith("CMake Error"):  # the next lines contain the message
            return " ".join(["CMake:", *itertools.takewhile(lambda x: "Call Stack" not in x, lines[number + 1 :][:4])])
        if re.search(r"\berror: |No space left", line, re.IGNORECASE):
            return line
    return lines[-1] if lines else "no message"


def install(path):
    """Install the wheel and its dependencies. All files are downloaded first, so installing takes only a second."""
    with tempfile.TemporaryDirectory(prefix="gluon_mgpu-horovod-") as folder:
        pip("download", "--dest", folder, str(path))
        held = signal.SIGINT, signal.SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, held)  # a Ctrl-C takes effect after the installation
        try:
            pip("install", "--no-index", "--find-links", folder, str(path))
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def pip(*arguments):
    finished = subprocesses.run([*PIP, *arguments])
    if finished.status:
        lines = [line for line in finished.err.splitlines() if line.startswith("ERROR")] or ["no message"]
        raise Error(f"pip {arguments[0]} of Horovod failed: {lines[-1]}")


def check():
    """Sum an array over two processes with Horovod. Returns a one-line report. Raises Error if the sum fails."""
    horovodrun = Path(sysconfig.get_path("scripts")) / "horovodrun"
    two = [str(horovodrun), "--gloo", "-np", "2", "-H", "localhost:2", sys.executable, "-c", CHECK]
    failed = f"Horovod {HOROVOD} is installed but does not work"
    try:
        finished = subprocesses.run(two, seconds=120)
    except OSError as error:
        raise Error(f"{failed}: {error}") from error
    if finished.status is None:
        raise Error(f"{failed}: no result within 120 s")
    if finished.status:
        wrong = re.search(r"^[\w.]*Error: .*", finished.err, re.MULTILINE)
        raise Error(f"{failed}: {wrong[0] if wrong else f'horovodrun exited with status {finished.status}'}")
    return f"Horovod {HOROVOD} with MXNet {version('mxnet')}: two processes summed an array with gloo"


if __name__ == "__main__":
    build_horovod()
