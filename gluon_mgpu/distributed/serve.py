"""Runs a dist_sync server or the scheduler: MXNet's own loop, plus a heartbeat."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

from gluon_mgpu.distributed import heartbeat, process
from gluon_mgpu.distributed.process import Process
from gluon_mgpu.runtime import engine, log


def serve(here: Process) -> None:
    """Serve until all workers are done; the heartbeat then ends this process. here: a server or the scheduler."""
    engine.configure(1)
    # Import MXNet before the heartbeat starts, because loading libmxnet from a slow disk blocks Python for a long time.
    # Import it as a worker: in a server, the import would run MXNet's own server, which unpickles any optimizer that a
    # worker sends.
    os.environ["DMLC_ROLE"] = "worker"
    import mxnet as mx
    from mxnet.base import _LIB, check_call

    os.environ["DMLC_ROLE"] = here.role
    if here.role == "scheduler":
        heartbeat.listen(here.root, here.port).close()  # gives a clear error if ps-lite's own port is in use
        connection: heartbeat.Coordinator | heartbeat.Client = heartbeat.Coordinator(here, here.root, here.port + 1)
        address = connection.own_address
        if address.startswith("127.") and here.root != "localhost" and not here.root.startswith("127."):
            unreachable = f"{here.root} resolves to {address}, which other machines cannot reach"
            log.say(f"{here}: DMLC_PS_ROOT_URI={unreachable}; use the network address instead", in_any_process=True)
    else:
        connection = heartbeat.Client(here, here.root, here.port + 1)
    process.prepare_ps_lite(connection.own_address, connection.coordinator_address)
    _pass_signals_on(connection.ask_to_stop)
    kv = mx.kv.create("dist_sync")

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    def ignore(head: int, body: bytes, _: int) -> None:
        log.say(f"{here}: ignoring a command from a worker: servers only sum arrays", in_any_process=True)

    check_call(_LIB.MXKVStoreRunServer(kv.handle, ignore, None))


def _pass_signals_on(ask_to_stop: Callable[[], bool]) -> None:
    """On Ctrl-C or SIGTERM, which a cluster manager sends to every process, ask the workers to stop. A second signal,
    unless it is a duplicate, terminates this process. MXNet's loop never returns to Python to run a signal handler, so
    a thread waits for signals."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, lambda *_: None)

    def wait() -> None:
        os.read(reader, 1)
        asked = time.monotonic()
        if ask_to_stop():
            while os.read(reader, 1) and time.monotonic() - asked < process.SAME_SIGNAL:
                pass
        os._exit(130)

    threading.Thread(target=wait, daemon=True).start()
