"""Prepares a Python process for an old MXNet program, and passes the settings on to its child processes.

The process that starts the program calls `variables`. The program's own process calls `prepare` before the program's
first line runs (see `startup`). Its Python may be 3.8, and has few packages (see `packages.COMMON`); so has what
`prepare` imports.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gluon_mgpu.compat import hooks, startup
from gluon_mgpu.old import contexts, differences, downloads, explain, packages
from gluon_mgpu.support import log, subprocesses

VARIABLE = "GLUON_MGPU_RUN"  # holds Preparation as JSON
STARTUP = Path(__file__).with_name("startup")
SPINS = "1000"  # fewer than for training, whose operators are larger: on a busy machine, small ones wait for each other


@dataclass(frozen=True)
class Preparation:
    """What `gluon-mgpu run` was asked for.

    gpus: if there is no GPU, the number of CPU contexts that the program can use as GPUs; None: any number, but
    mx.context.num_gpus() returns 0. data_dir: see `datasets.load`. here: in the current environment. start: see
    `explain.advice_on`.
    """

    gpus: int | None = None
    data_dir: str | None = None
    here: bool = False
    start: Sequence[str] = explain.START


def given() -> Preparation:
    """The settings of a process for which VARIABLE is set."""
    return Preparation(**json.loads(os.environ[VARIABLE]))


def variables(settings: Preparation, python: str | Path = sys.executable) -> dict[str, str]:
    """The environment variables with which to start a prepared program. python: the program's Python, whose own
    commands are found first."""
    users = subprocesses.users_environment()
    users.pop("PYTHONHOME", None)
    startup_first = os.pathsep.join(filter(None, [str(STARTUP), users.get("PYTHONPATH")]))
    commands_first = os.pathsep.join(filter(None, [os.path.dirname(python), users.get("PATH")]))
    ours = {"PYTHONPATH": startup_first, "PATH": commands_first, VARIABLE: json.dumps(asdict(settings))}
    return {**users, **ours}


def prepare() -> None:
    """If VARIABLE is set, prepare this process accordingly. Modules are changed when they are imported."""
    if VARIABLE not in os.environ:
        return
    settings = given()
    for name, names in differences.STANDARD_NAMES.items():
        hooks.on_import(name, functools.partial(differences.restore, names=names))
    hooks.on_import("urllib.request", functools.partial(downloads.replace_urlopen, data_dir=settings.data_dir))
    for name in ("mxnet.gluon.utils", "mxnet.test_utils", "gluoncv.utils.download"):
        hooks.on_import(name, functools.partial(downloads.replace_download, data_dir=settings.data_dir))
    hooks.on_import("mxnet", functools.partial(_prepare_mxnet, settings=settings))
    sys.excepthook = functools.partial(explain.explain, here=settings.here, start=settings.start)
    os.environ.setdefault("MXNET_CPU_TEMP_COPY", contexts.TEMP_COPIES)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if not settings.here:
        hooks.on_import("pip._internal.cli.main", _keep_packages)
    startup.plan(contexts=settings.gpus or 1, may_serve=True, own_threads=True)


def _keep_packages(pip: Any) -> None:
    """Make `pip install` and `pip uninstall` fail, because they would change the packages of all programs."""
    original = pip.main

    def main(args: list[str] | None = None) -> int:
        words = sys.argv[1:] if args is None else args
        command = next((word for word in words if not word.startswith("-")), "")
        is_ours = Path(sys.prefix, packages.COMPLETE).exists()  # the program may have made its own environment
        if command in ("install", "uninstall") and is_ours:
            advice = "add packages with `gluon-mgpu run --with PACKAGE`"
            log.error(f"pip would change the packages of all old programs; {advice}")
            return 1
        return int(original(args))

    pip.main = main


def _prepare_mxnet(mx: ModuleType, settings: Preparation) -> None:
    contexts.replace(mx, settings.gpus)
    if mx.__version__ < "2":
        differences.replace(mx)
