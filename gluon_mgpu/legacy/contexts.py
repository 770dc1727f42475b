"""Replaces a program's GPU contexts with CPU contexts if there is no GPU, and keeps several CPU contexts from hanging.

Without GPUs, mx.gpu(i) is CPU context i, so its arrays are printed with @cpu(i).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any

from gluon_mgpu.compat import startup
from gluon_mgpu.runtime import log

CPU = 1  # MXNet's number for CPU contexts
TEMP_COPIES = "4"  # MXNet's default. With more temporary spaces, programs with large arrays need more memory.
SYNC_TEMP_COPIES = "999"  # the most; ResNet-101 needs more than 256
SECONDS = 20  # without any computation, until a program with SyncBatchNorm is said to hang


def replace(mx: ModuleType, gpus: int | None) -> None:
    """Change how the imported mxnet creates contexts. gpus: see `prepare.Preparation`."""
    Context = mx.context.Context
    original = Context.__init__
    there_are_gpus = mx.context.num_gpus() > 0
    say_once = functools.cache(log.say)
    used = {0}  # indices of the CPU contexts in use; 0 is the default context

    def create(context: Any, device_type: Any, device_id: int = 0) -> None:
        if device_type == "gpu" and not there_are_gpus:
            if gpus is not None and not 0 <= device_id < gpus:
                raise mx.MXNetError(f"gpu({device_id}): the program was started with --gpus {gpus}; increase it")
            say_once("no GPU is available: mx.gpu(i) is CPU context i")
        original(context, device_type, device_id)
        if context.device_typeid == CPU and context.device_id not in used:
            used.add(context.device_id)
            if startup.openmp_threads() > 1:
                say_once("the program's CPU contexts use one thread each, and mostly take turns (docs/old-programs.md)")
                for index in sorted(used):
                    use_one_thread(mx, index)

    Context.__init__ = create
    if there_are_gpus:
        return
    keep_sync_batch_norm_from_hanging(mx)
    Context.devstr2type = {**Context.devstr2type, "gpu": CPU}

    def restore(context: Any, state: dict[str, Any]) -> None:
        vars(context).update(state)
        if context.device_type == "gpu":  # pickled on a machine with GPUs
            create(context, "gpu", context.device_id)

    Context.__setstate__ = restore
    answer_queries(mx, gpus)
    create_store = mx.kvstore.create
    mx.kvstore.create = lambda name="local": create_store("device" if name == "nccl" else name)


def answer_queries(mx: ModuleType, gpus: int | None) -> None:
    """Answer MXNet's functions that ask for the number of GPUs, and for a GPU's free and total memory in bytes."""

    def count(result: Any) -> int:
        result._obj.value = gpus or 0
        return 0

    def memory(device_id: Any, free: Any, total: Any) -> int:
        mx.gpu(getattr(device_id, "value", device_id))  # raises MXNetError if there are fewer
        pages = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PHYS_PAGES")
        free._obj.value, total._obj.value = (number * os.sysconf("SC_PAGE_SIZE") for number in pages)
        return 0

    mx.base._LIB.MXGetGPUCount, mx.base._LIB.MXGetGPUMemoryInformation64 = count, memory


def keep_sync_batch_norm_from_hanging(mx: ModuleType) -> None:
    """Use more temporary spaces for SyncBatchNorm. It holds one while it waits for the other context, whose operators
    may need the same one. This is too late if the program has used random numbers before; see also `run`."""
    nn = mx.gluon.nn if mx.__version__ >= "2" else mx.gluon.contrib.nn
    layer = nn.SyncBatchNorm
    create = layer.__init__

    def create_and_watch(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        if self._kwargs["ndev"] > 1:
            if os.environ["MXNET_CPU_TEMP_COPY"] == TEMP_COPIES:
                os.environ["MXNET_CPU_TEMP_COPY"] = SYNC_TEMP_COPIES
            watch()

    @functools.cache
    def watch() -> None:
        threading.Thread(target=_say_if_it_hangs, daemon=True).start()

    layer.__init__ = create_and_watch


def _say_if_it_hangs() -> None:
    """Print what to do if the main thread waits in MXNet, and no thread computes."""
    used, waits = 0.0, False
    while not waits:
        time.sleep(SECONDS)
        before, used = used, time.process_time()
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        waits = used - before < 0.1 and frame.f_globals["__name__"].startswith("mxnet.")
    advice = f"check its num_devices, or start the program with MXNET_CPU_TEMP_COPY={SYNC_TEMP_COPIES}"
    log.say(f"the program seems to hang in SyncBatchNorm: {advice}")


def use_one_thread(mx: ModuleType, index: int) -> None:
    """Make the engine's thread for a CPU context use one OpenMP thread. With more threads, two contexts could hang.

    A thread can change the number of OpenMP threads only for itself, so the change is queued like an operator.
    """

    class MXNetContext(ctypes.Structure):
        _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]

    gomp = ctypes.CDLL("libgomp.so.1")
    done = threading.Event()

    def change(*_: Any) -> None:
        gomp.omp_set_num_threads(1)
        done.set()

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(change)
    where = ctypes.byref(MXNetContext(CPU, index))
    none = ctypes.c_void_p()
    mx.base.check_call(
        mx.base._LIB.MXEnginePushSync(function, none, none, where, none, 0, none, 0, none, 0, b"one OpenMP thread")
    )
    done.wait()  # waitall would also raise the errors of the program's own operators
