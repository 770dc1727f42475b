"""Changes how the processes that `launch` has started end, so that one that fails can end all."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from types import ModuleType

from gluon_mgpu.support import log


def prepare_process() -> None:
    """Let only worker 0 print notices. Make a server fail if it cannot use the program's optimizer; MXNet would print a
    traceback, and go on without the optimizer."""
    is_worker = os.environ["DMLC_ROLE"] == "worker"
    log.muted = not (is_worker and os.environ["DMLC_TASK_ID"] == "0")

    def report(ignored: sys.UnraisableHookArgs) -> None:
        if "ctypes" not in (ignored.err_msg or ""):  # MXNet's library calls a server's only Python code
            return sys.__unraisablehook__(ignored)
        advice = "use one of MXNet's optimizers, or define yours in a module of its own"
        log.error(f"a server cannot use the program's optimizer ({ignored.exc_value}): {advice}")
        os._exit(1)

    if not is_worker:
        sys.unraisablehook = report


def prepare_worker(mx: ModuleType) -> None:
    """Let this process end without the others. By default, a KVStore waits for the other workers at exit, also if one
    of them has failed. It then ends the servers, which the launcher does instead."""
    if not mx.runtime.Features().is_enabled("DIST_KVSTORE"):
        log.error("this MXNet does not support dist_sync or dist_async: use a wheel of mxnet==1.9.1 for x86-64")
        sys.exit(2)
    libc = ctypes.CDLL(None)

    def end() -> None:
        if not hasattr(sys, "last_value"):  # no uncaught exception
            mx.nd.waitall()
        mx.kvstore.KVStore.__del__ = lambda self: None
        libc.on_exit(libc._exit, None)  # registered last, so it comes before destructors in C++, which would abort

    atexit.register(end)
