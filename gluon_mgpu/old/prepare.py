"""Prepares a Python process for an old MXNet program, and passes the settings on to its child processes.

The process that starts the program calls `environment`. The program's own process calls `prepare` before the program's
first line runs (see `startup`).
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from gluon_mgpu.compat import startup
from gluon_mgpu.old import arrays, contexts, downloads, kvstore, names, third_party
from gluon_mgpu.support import subprocesses
from gluon_mgpu.support.errors import UsageError

VARIABLE = "GLUON_MGPU_RUN"  # holds Preparation as JSON
STARTUP = Path(__file__).with_name("startup")
MOST_GPUS = 64


@dataclass(frozen=True)
class Preparation:
    """gpus: if there is no GPU, the number of CPU contexts that the program can use as GPUs; None: any number, but
    mx.context.num_gpus() returns 0. data_dir: see `datasets.load`. launched: this is one of several processes that
    `launch` has started."""

    gpus: int | None = None
    data_dir: str | None = None
    launched: bool = False


def environment(settings: Preparation) -> dict[str, str]:
    """The environment variables with which to start a prepared program."""
    users = subprocesses.users_environment()
    paths = [str(STARTUP), *filter(None, [users.get("PYTHONPATH")])]
    return {**users, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: json.dumps(asdict(settings))}


def prepare() -> None:
    """If VARIABLE is set, prepare this process accordingly. mxnet and numpy are patched when they are imported."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return
    try:
        settings = Preparation(**json.loads(text))
    except (ValueError, TypeError) as error:
        print(f"error: {VARIABLE}={text}: not a value from `gluon-mgpu run` ({error}); unset it", file=sys.stderr)
        os._exit(UsageError.exit_status)  # at Python's startup, SystemExit would print a traceback
    after = {**third_party.RESTORE, "numpy": arrays.add_to_numpy}
    for module, restored in names.STANDARD_NAMES.items():
        after[module] = functools.partial(names.restore, names=restored)
    after["urllib.request"] = functools.partial(downloads.replace_urlopen, data_dir=settings.data_dir)
    after["requests"] = functools.partial(downloads.replace_send, data_dir=settings.data_dir)
    after["gluoncv.utils.download"] = functools.partial(downloads.replace_download, data_dir=settings.data_dir)
    after["mxnet"] = lambda mx: _prepare_mxnet(mx, settings)
    sys.meta_path.insert(0, AfterImport(after))
    sys.meta_path.append(names.Missing())
    os.environ.setdefault("MXNET_CPU_TEMP_COPY", contexts.TEMP_COPIES)
    startup.plan(contexts=settings.gpus or 1, may_serve=True)
    if settings.launched:
        kvstore.prepare_process()


def _prepare_mxnet(mx: ModuleType, settings: Preparation) -> None:
    from gluon_mgpu.old import early_mxnet, onednn

    downloads.replace(mx, settings.data_dir)
    contexts.replace(mx, settings.gpus)
    if mx.__version__ < "2":
        onednn.replace(mx)
    early_mxnet.add_to_mxnet(mx)
    if settings.launched:
        kvstore.prepare_worker(mx)


class AfterImport:
    """Calls functions right after modules are imported, or now for modules that are imported already.

    actions: {module's name: function that takes the module}.
    """

    def __init__(self, actions: dict[str, Callable[[ModuleType], object]]) -> None:
        self.actions = actions
        for name in actions.keys() & sys.modules.keys():
            actions[name](sys.modules[name])

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is None or spec.loader is None:
            return None
        if name in names.STANDARD_NAMES and not (spec.origin or "").startswith(os.path.dirname(os.__file__)):
            return spec  # the program has its own module with this name
        execute, action = spec.loader.exec_module, self.actions[name]

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            action(module)

        spec.loader.exec_module = execute_then_act  # type: ignore[method-assign]  # changes only this loader
        return spec
