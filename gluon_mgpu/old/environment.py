"""Makes environments for old programs: a Python of their time, with packages of their time.

They are in the user's cache, one per Python version and list of requirements, whose hash is in the name. An environment
is made in place, because its scripts contain its path. The file COMPLETE is written last; a folder without it is not
used. Packages that the user adds are in a second, small environment, which also finds the first one's packages.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from gluon_mgpu.old import packages
from gluon_mgpu.support import files, log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError

COMPLETE = "complete"  # the file's content is the list of requirements
# Prints the version, such as 3.8, if this Python can make environments
SUITABLE = "import ctypes, ensurepip, lib2to3, sys, venv; print('%d.%d' % sys.version_info[:2])"
DOWNLOADS = {"mxnet==1.9.1": "180 MB", "mxnet-cu112==1.9.1": "2.3 GB"}


def folder() -> Path:
    return platformdirs.user_cache_path("gluon_mgpu") / "environments"


def find_or_make(
    python: str | None = None, cpu: bool = False, extra: Sequence[str] = (), requirements: str | None = None
) -> Path:
    """The Python of an environment. It is made if there is none, which takes minutes and needs the package index.

    python: a version in packages.PINS; None: the oldest. cpu: see `packages.required`. extra, requirements: packages
    that the user adds, and the user's file of them. Raises Error if it cannot be made, and then leaves nothing behind.
    """
    base = _base(python, cpu)
    if not extra and not requirements:
        return _python(base)
    try:
        content = [Path(requirements).read_text()] if requirements else []
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("requirements", requirements, f"cannot be read ({error})") from None
    added = folder() / f"{base.name}-{_digest([*extra, *content])}"
    if not _is_complete(added):
        arguments = [*extra, *(["-r", os.path.abspath(requirements)] if requirements else [])]
        _make(added, str(_python(base)), arguments, f"adding {' '.join(arguments)}", base)
    return _python(added)


def remove() -> None:
    """Remove all environments."""
    if folder().is_dir():
        with _locked():
            for path in _made():
                shutil.rmtree(path)


def described() -> list[str]:
    """A line for each environment: its folder, its size, and what was asked for."""
    lines = []
    for path in _made():
        content = (path / COMPLETE).read_text() if _is_complete(path) else "incomplete: not used"
        lines.append(f"{path}: {_megabytes(path)} MB: {' '.join(content.split())}")
    return lines


def _made() -> list[Path]:
    return sorted(map(Path, glob.glob(f"{glob.escape(str(folder()))}/python*/")))


def _base(python: str | None, cpu: bool) -> Path:
    """The environment without what the user adds."""
    versions = [python] if python else [*packages.PINS]
    required = {version: packages.required(version, cpu) for version in versions}
    paths = {version: folder() / f"python{version}-{_digest(names)}" for version, names in required.items()}
    for path in paths.values():
        if _is_complete(path):
            return path
    version, found = _find_python(versions)
    mxnet = required[version][0]
    what = f"Python {version}, {mxnet} and packages of its time ({DOWNLOADS[mxnet]} to download, once)"
    _make(paths[version], found, ["--only-binary", ":all:", *required[version]], f"making an environment: {what}")
    return paths[version]


def _make(path: Path, python: str, arguments: Sequence[str], what: str, base: Path | None = None) -> None:
    """Make the environment `path`. arguments: of `pip install`. base: the environment that it extends."""
    start = time.monotonic()
    with _locked():
        if _is_complete(path):  # another process has just made it
            return
        log.say(f"{what} in {path}")
        try:
            path.mkdir(exist_ok=True)  # raises an error that names it
            without_pip = ["--without-pip"] if base else []
            _run("cannot make an environment", python, "-m", "venv", *without_pip, "--clear", path)
            # -I: what is on PYTHONPATH is not in the environment.
            pip = [_python(path), "-I", "-m", "pip", "--disable-pip-version-check", "install", "--prefer-binary"]
            if base:
                (_site_packages(path) / "base.pth").write_text(f"{_site_packages(base)}\n")
                limits = path / "limits.txt"
                limits.write_text("\n".join(packages.LIMITS.split()))
                pip += ["--constraint", limits]
            _run("cannot install packages", *pip, *arguments)
            content = "\n".join(word for word in arguments if not word.startswith((":", "-"))).encode()
            files.write_whole(path / COMPLETE, lambda file: file.write(content))
        finally:
            if not (path / COMPLETE).exists():
                shutil.rmtree(path, ignore_errors=True)
    log.say(f"made in {time.monotonic() - start:.0f} s ({_megabytes(path)} MB)")


def _run(failure: str, *command: object) -> None:
    """Run venv or pip. Raises Error with the last line of its errors."""
    finished = subprocesses.run([*map(str, command)])
    if finished.status:
        lines = [line for line in finished.err.splitlines() if "ERROR: " in line and "ResolutionImp" not in line]
        needs = "it needs space, and the package index or a folder of wheels (docs/old-programs.md)"
        raise Error(f"{failure}: {lines[-1].strip() if lines else _last(finished.err)}; {needs}")


def _find_python(versions: Sequence[str]) -> tuple[str, str]:
    """(version, path) of the first suitable Python. If there is none, uv downloads one. Raises Error if that fails."""
    pyenv = os.path.expanduser(os.environ.get("PYENV_ROOT") or "~/.pyenv")
    for version in versions:
        pythons = [shutil.which(f"python{version}"), *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python"))]
        for python in filter(None, [*pythons, sys._base_executable]):  # type: ignore[attr-defined]
            with suppress(OSError):
                found = subprocess.run([python, "-I", "-c", SUITABLE], capture_output=True, text=True)
                if found.stdout.strip() == version:
                    return version, python
    names = f"Python {' to '.join(dict.fromkeys([versions[0], versions[-1]]))}"
    uv, version = shutil.which("uv"), versions[-1]
    if uv is None:
        raise Error(f"no {names} with its venv module: install one (Debian, Ubuntu: python3-venv), or `pip install uv`")
    log.say(f"downloading Python {version} with uv")
    for words in (["install", version], ["find", "--system", version]):
        finished = subprocesses.run([uv, "python", *words])
        if finished.status:
            raise Error(f"no {names}, and uv cannot download one ({_last(finished.err)}): install one")
    return version, finished.out.strip()


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


@contextmanager
def _locked() -> Iterator[None]:
    """Wait for other processes that make or remove environments. Raises Error if the cache cannot be written."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder(), os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.say(f"waiting until another process has made an environment in {folder()}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Error(
            f"cannot write to {error.filename} ({error.strerror}): set XDG_CACHE_HOME to another folder"
        ) from None


def _digest(requirements: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([platform.machine(), *requirements]).encode()).hexdigest()[:8]


def _is_complete(path: Path) -> bool:
    # The Python itself may have been removed. Another user's environment may be unreadable.
    return all(os.path.exists(file) for file in (path / COMPLETE, _python(path)))


def _python(path: Path) -> Path:
    return path / "bin" / "python"


def _site_packages(path: Path) -> Path:
    return next((path / "lib").glob("python*")) / "site-packages"


def _megabytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*")) >> 20
