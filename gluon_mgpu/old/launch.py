"""Starts an old program that uses kv=dist_sync or dist_async: a scheduler, servers and workers, all on this machine.

In a scheduler or server, the program's `import mxnet` runs MXNet's own loop, which only the launcher ends. `kvstore`
changes what the processes do when they end or fail.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from subprocess import DEVNULL, Popen, TimeoutExpired

from gluon_mgpu.compat import startup
from gluon_mgpu.old import prepare
from gluon_mgpu.support import log, subprocesses

HOST = "127.0.0.1"  # other machines cannot connect
SECONDS_TO_STOP = 5  # for each worker after Ctrl-C
END_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """Let Linux kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)


def launch(command: Sequence[str], settings: prepare.Preparation, workers: int, servers: int) -> int:
    """Run a command until all workers have exited or a process has failed. Returns 0, or the failure's status. Call
    this in the main thread, because it raises SystemExit after Ctrl-C or SIGTERM."""
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    env = {**prepare.environment(replace(settings, launched=True)), "DMLC_NODE_HOST": HOST}
    env |= {"DMLC_PS_ROOT_URI": HOST, "DMLC_PS_ROOT_PORT": str(port)}
    env |= {"DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers)}
    env.pop("PORT", None)  # every process would listen on this port
    if settings.gpus in (None, 1):  # several contexts use one thread each
        env.setdefault("OMP_NUM_THREADS", str(max(1, startup.cores() // workers)))
    processes = list["Popen[bytes]"]()
    roles = ["scheduler", *["server"] * servers, *["worker"] * workers]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        for index, role in enumerate(roles):
            process = Popen(
                command,
                env={**env, "DMLC_ROLE": role, "DMLC_TASK_ID": str(index - roles.index(role))},
                stdin=DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher
                preexec_fn=end_with_parent,
            )
            processes.append(process)
        running = True
        while running:
            time.sleep(0.02)
            running = any(process.poll() is None for process in processes[-workers:])
            for process, role in zip(processes, roles):
                if status := process.poll():
                    log.error(f"a {role} (process {process.pid}) {subprocesses.how_it_ended(status)}")
                    return status if status > 0 else 128 - status
        return 0
    except SystemExit:
        for process in processes[-workers:]:
            process.send_signal(signal.SIGINT)
        for process in processes[-workers:]:
            with suppress(TimeoutExpired):
                process.wait(SECONDS_TO_STOP)
        raise
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
