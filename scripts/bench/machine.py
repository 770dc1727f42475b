"""What a measurement ran on, and leaving its result as JSON and a picture."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

from gluon_mgpu import __version__
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import checkpoint

SETTINGS = ("OMP_", "GOMP_", "MXNET_", "MALLOC_", "GLIBC_TUNABLES")  # of the engine, in the environment


def facts() -> dict:
    """{name: value} of the machine, the versions, and the engine's settings in this process's environment."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "gluon_mgpu": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mxnet", "numpy", "torch")},
        "settings": {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)},
    }


def line() -> str:
    """The facts but the settings, in a line."""
    found = facts()
    versions = {"Python": "python", "MXNet": "mxnet", "NumPy": "numpy", "PyTorch": "torch"}
    named = ", ".join(f"{name} {found[key]}" for name, key in versions.items() if found[key])
    return f"{found['cores']} cores of {found['cpu']}; {named}"


def peak_mb() -> float:
    """The most memory that this process has had, in MB. getrusage would count what the process that started it had."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def leave(out: str | Path, name: str, result: dict, draw: Callable[[dict, BinaryIO], None]) -> None:
    """Leave result, with the machine's facts, as NAME.json in the folder out, and draw(result, file) as NAME.png."""
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error(f"--out {out}: cannot be written ({error.strerror}): give another folder") from None
    text = json.dumps({"machine": facts(), **result}, indent=1) + "\n"
    checkpoint.write_whole(out / f"{name}.json", lambda file: file.write(text.encode()))
    checkpoint.write_whole(out / f"{name}.png", lambda file: draw(result, file))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return version("mxnet-cu112") if package == "mxnet" else None


def _cpu() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()
