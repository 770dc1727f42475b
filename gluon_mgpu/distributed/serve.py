"""What a server and the scheduler of dist_sync do: MXNet's own loop, in a process that the watch sees."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

from gluon_mgpu.distributed import heartbeat as watch
from gluon_mgpu.distributed import process as place
from gluon_mgpu.runtime import engine


def serve(here: place.Place) -> None:
    """What a server's and the scheduler's process do until the workers are done. here: a Place of dist_sync."""
    engine.configure(1)
    # Before the watch, to which Python gives no sign of life while libmxnet loads, from a slow disk for many seconds.
    # MXNet, imported by a server, would serve at once, and unpickle what it is sent as an optimizer.
    os.environ["DMLC_ROLE"] = "worker"
    import mxnet as mx
    from mxnet.base import _LIB, check_call

    os.environ["DMLC_ROLE"] = here.role
    if here.role == "scheduler":

        def end(line: str) -> None:
            watch.end_with(f"the scheduler: {line}", 1, watch.BEAT)  # when the others have read it

        watch.Hub(here.root, here.port, ()).close()  # refuses a port that is taken, where ps-lite would not say which
        hub = watch.Hub(here.root, here.port + 1, here.members(), end, watch.end_soon)
        address, root, ask_to_stop, done = hub.address, hub.address, hub.ask_to_stop, hub.close
        if address.startswith("127.") and here.root != "localhost" and not here.root.startswith("127."):
            print(
                f"gluon_mgpu: the scheduler: {here.root} is {address} to this machine, where no other one reaches it: "
                "give its address in the network as DMLC_PS_ROOT_URI",
                file=sys.stderr,
                flush=True,
            )
    else:
        member = watch.Member(here.root, here.port + 1, str(here), here.members())
        address, root, ask_to_stop, done = member.own_address, member.hub_address, member.ask_to_stop, member.done
    place.for_ps_lite(address, root)
    _pass_on_signals(ask_to_stop)
    kv = mx.kv.create("dist_sync")

    @ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
    def no_command(which: int, body: bytes, _: int) -> None:
        print(f"gluon_mgpu: {here}: a worker's command is ignored: servers sum, and update nothing", file=sys.stderr)

    check_call(_LIB.MXKVStoreRunServer(kv.handle, no_command, None))
    done()


def _pass_on_signals(ask_to_stop: Callable[[], bool]) -> None:
    """Ctrl-C and SIGTERM, which a cluster sends to all processes of a run, are the workers' to heed; a second one ends
    this process. MXNet's loop does not come back to Python for a handler, so a thread waits for them."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told)
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, lambda *_: None)

    def pass_on() -> None:
        os.read(heard, 1)
        if ask_to_stop():
            os.read(heard, 1)
        os._exit(130)

    threading.Thread(target=pass_on, daemon=True).start()
