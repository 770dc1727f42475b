"""Makes environments for old programs: a Python of their time, with packages of their time.

They are in the user's cache, one per Python version and list of requirements, whose hash is in the name. An environment
is made in place, because its scripts contain its path. The file packages.COMPLETE is written last; a folder without it,
or one that was moved, is not used. Packages that the user adds are in a second, small environment, which also finds the
first one's packages.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from gluon_mgpu.old import additions, packages
from gluon_mgpu.support import files, log, subprocesses
from gluon_mgpu.support.errors import Error

# Prints the version, such as 3.8, if this Python can make environments
SUITABLE = "import ctypes, ensurepip, lib2to3, sys, venv; print('%d.%d' % sys.version_info[:2])"
DOWNLOADS = {"mxnet==1.9.1": "180 MB", "mxnet-cu112==1.9.1": "2.3 GB"}


def folder() -> Path:
    return platformdirs.user_cache_path("gluon_mgpu") / "environments"


def find_or_make(
    python: str | None = None, cpu: bool = False, extra: Sequence[str] = (), requirements: str | None = None
) -> Path:
    """The Python of an environment. It is made if there is none, which takes minutes and needs the package index.

    python: a version in packages.PINS; None: the oldest that has an environment, or else is installed. cpu: see
    `packages.required`. extra, requirements: packages that the user adds, and the user's file of them. Raises Error if
    it cannot be made, and then leaves nothing behind.
    """
    additions.check(extra)
    wanted, constraints = additions.read(requirements) if requirements else ([], [])
    base, pinned = _base(python, cpu)
    wanted, has = additions.split(wanted, pinned)
    constraints, _ = additions.split(constraints, pinned)
    differing = [*additions.differing(has, pinned)]
    if differing:
        log.say(f"{requirements}: the environment's own versions are used for {', '.join(differing)}")
    if not extra and all(additions.is_option(line) for line in wanted):
        return _python(base)
    added = folder() / f"{base.name}-{_digest([*extra, *wanted, *constraints])}"
    if not _is_complete(added):
        what = f"adding {' '.join([*extra, *([os.path.abspath(requirements)] if requirements else [])])}"
        _make(added, str(_python(base)), [*extra, *wanted], what, base, constraints)
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
        asked = "incomplete: not used"
        if _is_complete(path):
            _, *requirements = (path / packages.COMPLETE).read_text().split("\n")
            asked = " ".join(requirements)
        lines.append(f"{path}: {_megabytes(path)} MB: {asked}")
    return lines


def _made() -> list[Path]:
    return sorted(map(Path, glob.glob(f"{glob.escape(str(folder()))}/python*/")))


def _base(python: str | None, cpu: bool) -> tuple[Path, list[str]]:
    """The environment without what the user adds, and its requirements."""
    versions = [python] if python else [*packages.PINS]
    required = {version: packages.required(version, cpu) for version in versions}
    paths = {version: folder() / f"python{version}-{_digest(names)}" for version, names in required.items()}
    for version, path in paths.items():
        if _is_complete(path):
            return path, required[version]
    version, found = _find_python(versions)
    mxnet = required[version][0]
    what = f"Python {version}, {mxnet} and packages of its time ({DOWNLOADS[mxnet]} to download, once)"
    _make(paths[version], found, required[version], f"making an environment: {what}")
    return paths[version], required[version]


def _make(
    path: Path,
    python: str,
    requirements: Sequence[str],
    what: str,
    base: Path | None = None,
    constraints: Sequence[str] = (),
) -> None:
    """Make the environment `path`. requirements: what pip installs. base: the environment that it extends."""
    start = time.monotonic()
    with _locked():
        if _is_complete(path):  # another process has just made it
            return
        log.say(f"{what} in {path}")
        try:
            path.mkdir(exist_ok=True)  # raises an error that names it
            without_pip = ["--without-pip"] if base else []
            finished = subprocesses.run([python, "-m", "venv", *without_pip, "--clear", str(path)])
            if finished.status:
                raise Error(f"cannot make an environment: {_last(finished.err)}")
            # -I: what is on PYTHONPATH is not in the environment.
            pip = [str(_python(path)), "-I", "-m", "pip", "--disable-pip-version-check", "install", "--prefer-binary"]
            (path / "requirements.txt").write_text("\n".join(requirements))
            if base:
                (_site_packages(path) / "base.pth").write_text(f"{_site_packages(base)}\n")
                (path / "limits.txt").write_text("\n".join([*packages.LIMITS.split(), *constraints]))
                pip += ["--constraint", str(path / "limits.txt")]
            else:
                pip += ["--only-binary", ":all:"]
            finished = subprocesses.run([*pip, "-r", str(path / "requirements.txt")])
            if finished.status:
                raise Error(f"cannot install packages: {_reason(finished.out, finished.err)}")
            if base and (_site_packages(path) / "mxnet").exists():
                raise Error("cannot install packages: they contain another MXNet, and the environment has MXNet 1.9.1")
            if base:
                _copy_commands(base, path)
            content = "\n".join([str(path), *requirements]).encode()
            files.write_whole(path / packages.COMPLETE, lambda file: file.write(content))
        finally:
            if not (path / packages.COMPLETE).exists():
                shutil.rmtree(path, ignore_errors=True)
    log.say(f"made in {time.monotonic() - start:.0f} s ({_megabytes(path)} MB)")


def _copy_commands(base: Path, path: Path) -> None:
    """Give an environment the commands of the one that it extends, such as pip, for its own Python."""
    before, after = (str(_python(environment)).encode() for environment in (base, path))
    for script in (base / "bin").iterdir():
        copy = path / "bin" / script.name
        if script.is_file() and not script.is_symlink() and not copy.exists() and before in script.read_bytes():
            copy.write_bytes(script.read_bytes().replace(before, after))
            copy.chmod(0o755)


def _reason(out: str, err: str) -> str:
    """Why pip failed, and what to do."""
    conflict = out.partition("The conflict is caused by:\n")[2].partition("\n\n")[0]
    if conflict:
        lines = [line.strip().removeprefix("The user requested ") for line in conflict.splitlines()]
        parts = [re.sub(r"^\(constraint\) (\S+)", r"\1 (a limit of this environment)", line) for line in lines]
        return f"nothing fits all of: {'; '.join(parts)}"
    errors = [line.replace("ERROR: ", "") for line in err.splitlines() if line.startswith("ERROR: ")]
    collected = re.findall(r"^Collecting (\S+)", out, re.MULTILINE)
    if collected and not errors:
        advice = "omit its version, or choose one that has a wheel for this Python"
        return f"{collected[-1]} has no wheel for this Python, and could not be built; {advice}"
    reason = errors[-1].strip() if errors else _last(err)
    if re.search("connection broken|Could not fetch URL", err):
        return f"{reason}; the package index cannot be reached: see docs/old-programs.md for a folder of wheels"
    if "No space left" in reason:
        return f"{reason}; free some space, or set XDG_CACHE_HOME to another folder"
    return reason


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
    with suppress(OSError):  # another user's environment may be unreadable
        made_in = (path / packages.COMPLETE).read_text().partition("\n")[0]  # its scripts contain this path
        return os.path.samefile(made_in, path) and os.path.exists(_python(path))  # the Python may have been removed
    return False


def _python(path: Path) -> Path:
    return path / "bin" / "python"


def _site_packages(path: Path) -> Path:
    return next((path / "lib").glob("python*")) / "site-packages"


def _megabytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*")) >> 20
