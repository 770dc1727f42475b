"""Runs a server or the scheduler of dist_sync: MXNet's own loop, in a process that takes part in the heartbeat."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

from gluon_mgpu.distributed import heartbeat, process
from gluon_mgpu.distributed.process import Process
from gluon_mgpu.runtime import engine


def serve(here: Process) -> None:
    """Serve until all workers are done. here: this process, a server or the scheduler."""
    engine.configure(1)
    # Import MXNet before the heartbeat starts, because loading libmxnet from a slow disk blocks Python for a long time.
    # Import it as a worker: as a server, the import itself would serve, and unpickle an optimizer that a worker sends.
    os.environ["DMLC_ROLE"] = "worker"
    import mxnet as mx
    from mxnet.base import _LIB, check_call

    os.environ["DMLC_ROLE"] = here.role
    ask_to_stop, done = _scheduler(here) if here.role == "scheduler" else _server(here)
    _pass_signals_on(ask_to_stop)
    kv = mx.kv.create("dist_sync")

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    def ignore(head: int, body: bytes, _: int) -> None:
        print(f"gluon_mgpu: {here}: ignoring a command from a worker: servers only sum", file=sys.stderr)

    check_call(_LIB.MXKVStoreRunServer(kv.handle, ignore, None))
    done()


def _server(here: Process) -> tuple[Callable[[], bool], Callable[[], None]]:
    client = heartbeat.Client(here.root, here.port + 1, str(here), here.names())
    process.prepare_ps_lite(client.own_address, client.coordinator_address)
    return client.ask_to_stop, client.done


def _scheduler(here: Process) -> tuple[Callable[[], bool], Callable[[], None]]:
    def end(line: str, reported: bool) -> None:
        heartbeat.end_process(None if reported else f"{here}: {line}", 1, heartbeat.BEAT)

    def over() -> None:
        heartbeat.exit_after(heartbeat.GRACE, 0)

    heartbeat.Coordinator(here.root, here.port, ()).close()  # gives a clear error if ps-lite's own port is in use
    coordinator = heartbeat.Coordinator(here.root, here.port + 1, here.names(), end, over)
    address = coordinator.address
    if address.startswith("127.") and here.root != "localhost" and not here.root.startswith("127."):
        print(
            f"gluon_mgpu: {here}: DMLC_PS_ROOT_URI={here.root} is {address} on this machine; other machines cannot "
            "reach it: use the machine's network address",
            file=sys.stderr,
            flush=True,
        )
    process.prepare_ps_lite(address, address)
    return coordinator.ask_to_stop, coordinator.close


def _pass_signals_on(ask_to_stop: Callable[[], bool]) -> None:
    """On Ctrl-C or SIGTERM, which a cluster sends to every process, ask the workers to stop. A second signal ends
    this process. MXNet's loop never returns to Python to run a signal handler, so a thread waits for signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, lambda *_: None)

    def wait() -> None:
        os.read(reader, 1)
        if ask_to_stop():
            os.read(reader, 1)
        os._exit(130)

    threading.Thread(target=wait, daemon=True).start()
