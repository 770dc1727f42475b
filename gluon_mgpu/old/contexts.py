"""Replaces a program's GPU contexts with CPU contexts if there is no GPU, and keeps several CPU contexts from hanging.

Without GPUs, mx.gpu(i) is CPU context i + 1, and printed so. It differs from mx.cpu(), so as_in_context copies. Loaded
arrays are in mx.cpu(), wherever they were saved; operators accept arrays of several CPU contexts.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from gluon_mgpu.compat import startup
from gluon_mgpu.support import log

CPU = 1  # MXNet's number for this kind of contexts
TEMP_COPIES = "4"  # MXNet's default. With more temporary spaces, programs with large arrays need more memory.
SYNC_TEMP_COPIES = "999"  # the most; ResNet-101 needs more than 256


def replace(mx: ModuleType, gpus: int | None) -> None:
    """Change how the imported mxnet creates contexts. gpus: see `prepare.Preparation`."""
    Context = mx.context.Context
    original = Context.__init__
    there_are_gpus = mx.context.num_gpus() > 0
    say_once = functools.lru_cache(log.say)
    used = {0}  # indices of the CPU contexts in use; 0 is the default context
    limited: set[int] = set()  # those that use one thread

    def create(context: Any, device_type: Any, device_id: int = 0) -> None:
        is_gpu = device_type == "gpu" and not there_are_gpus
        if is_gpu:
            if gpus is not None and not 0 <= device_id < gpus:
                raise mx.MXNetError(f"gpu({device_id}): the program was started with --gpus {gpus}; increase it")
            say_once("no GPU is available: mx.gpu(i) is CPU context i + 1")
        original(context, device_type, device_id + is_gpu)
        if context.device_typeid == CPU and context.device_id not in used:
            used.add(context.device_id)
            if startup.openmp_threads() > 1:
                if is_gpu and used == {0, 1}:  # a single GPU keeps all threads
                    limited.add(0)
                else:
                    say_once("CPU contexts use one thread each, and mostly take turns (docs/old-programs.md)")
                    limited.update(used)
                limit()

    def limit() -> None:
        for index in sorted(limited):
            startup.use_one_thread(index)

    os.register_at_fork(after_in_parent=limit)  # MXNet restarts its threads
    Context.__init__ = create
    if there_are_gpus:
        return
    keep_sync_batch_norm_from_hanging(mx)
    Context.devstr2type = {**Context.devstr2type, "gpu": CPU}

    def count(result: Any) -> int:
        result._obj.value = gpus or 0
        return 0

    mx.base._LIB.MXGetGPUCount = count
    create_store = mx.kvstore.create
    mx.kvstore.create = lambda name="local": create_store("device" if name == "nccl" else name)


def keep_sync_batch_norm_from_hanging(mx: ModuleType) -> None:
    """Use more temporary spaces for SyncBatchNorm. It holds one while it waits for the other context, whose operators
    may need the same one. This is too late if the program has used random numbers before; see also `run`."""
    nn = mx.gluon.nn if mx.__version__ >= "2" else mx.gluon.contrib.nn
    layer = nn.SyncBatchNorm
    create = layer.__init__

    def create_with_more(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        if self._kwargs["ndev"] > 1 and os.environ["MXNET_CPU_TEMP_COPY"] == TEMP_COPIES:
            os.environ["MXNET_CPU_TEMP_COPY"] = SYNC_TEMP_COPIES

    layer.__init__ = create_with_more
