"""Replaces a program's GPU contexts with CPU contexts if there is no GPU, and keeps several CPU contexts from hanging.

Without GPUs, mx.gpu(i) is CPU context i + 1, and printed so. It differs from mx.cpu(), so as_in_context copies.
"""

from __future__ import annotations

import functools
import io
import os
import struct
from contextlib import suppress
from types import ModuleType
from typing import Any, BinaryIO

from gluon_mgpu.compat import startup
from gluon_mgpu.support import log

CPU, GPU = 1, 2  # MXNet's numbers for kinds of contexts
TEMP_COPIES = "4"  # MXNet's default. With more temporary spaces, programs with large arrays need more memory.
SYNC_TEMP_COPIES = "999"  # the most; ResNet-101 needs more than 256


def replace(mx: ModuleType, gpus: int | None) -> None:
    """Change how the imported mxnet creates contexts. gpus: see `prepare.Preparation`."""
    Context = mx.context.Context
    original = Context.__init__
    there_are_gpus = mx.context.num_gpus() > 0
    say_once = functools.lru_cache(log.say)
    used = {0}  # indices of the CPU contexts in use; 0 is the default context
    replaced: set[int] = set()  # those that are the program's GPUs
    limited: set[int] = set()  # those that use one thread

    def create(context: Any, device_type: Any, device_id: int = 0) -> None:
        is_gpu = device_type == "gpu" and not there_are_gpus
        if is_gpu:
            if gpus is not None and not 0 <= device_id < gpus:
                raise mx.MXNetError(f"gpu({device_id}): the program was started with --gpus {gpus}; increase it")
            say_once("no GPU is available: mx.gpu(i) is CPU context i + 1")
            replaced.add(device_id + 1)
        original(context, device_type, device_id + is_gpu)
        if context.device_typeid == CPU and context.device_id not in used:
            used.add(context.device_id)
            if startup.openmp_threads() > 1:
                if is_gpu and used == {0, 1}:  # a single GPU keeps all threads
                    limited.add(0)
                else:
                    say_once(
                        "the program's CPU contexts use one thread each, and mostly take turns (docs/old-programs.md)"
                    )
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

    def restore(context: Any, state: dict[str, Any]) -> None:
        vars(context).update(state)
        if context.device_type == "gpu":  # pickled on a machine with GPUs
            create(context, "gpu", context.device_id)

    Context.__setstate__ = restore
    keep_contexts(mx, replaced)
    answer_queries(mx, gpus)
    create_store = mx.kvstore.create
    mx.kvstore.create = lambda name="local": create_store("device" if name == "nccl" else name)


def keep_contexts(mx: ModuleType, gpus: set[int]) -> None:
    """Load arrays to the GPU on which they were saved, if the program uses it, and let an optimizer count a GPU's
    updates under the GPU's own index, as in files from machines with GPUs. gpus: their CPU contexts' indices."""
    NDArray, load, unpickle = mx.nd.NDArray, mx.nd.load, mx.nd.NDArray.__setstate__
    optimizer = mx.optimizer.Optimizer
    count = optimizer._set_current_context

    def moved(array: Any, device_type: int, device_id: int) -> Any:
        index = device_id + (device_type == GPU)
        return array.as_in_context(mx.cpu(index)) if index in gpus else array

    def load_and_move(fname: str) -> Any:
        loaded = load(fname)
        pairs = loaded.items() if isinstance(loaded, dict) else enumerate(loaded)
        with suppress(OSError, struct.error), open(fname, "rb") as file:
            file.seek(24)  # behind the file's own header
            for name, array in list(pairs):
                loaded[name] = moved(array, *saved_context(file))
                if array.stype != "default":
                    break
                file.seek(4 + array.size * array.dtype().itemsize, os.SEEK_CUR)
        return loaded

    def unpickle_and_move(array: Any, state: dict[str, Any]) -> None:
        unpickle(array, state)
        if state["handle"] is not None:
            copy = moved(array, *saved_context(io.BytesIO(state["handle"])))
            array.handle, copy.handle = copy.handle, array.handle

    mx.nd.load = mx.nd.utils.load = load_and_move
    NDArray.__setstate__ = unpickle_and_move
    optimizer._set_current_context = lambda self, device_id: count(self, device_id - (device_id in gpus))


def saved_context(file: BinaryIO) -> tuple[int, int]:
    """(device type, index) of the saved array that begins here. Raises struct.error for other formats."""
    magic, storage = struct.unpack("<Ii", file.read(8))
    if magic not in (0xF993FAC9, 0xF993FACA):
        raise struct.error
    for _ in range(1 if storage == 0 else 2):  # a sparse array has the shape of its values, too
        file.seek(8 * struct.unpack("<i", file.read(4))[0], os.SEEK_CUR)
    device_type, device_id = struct.unpack("<ii", file.read(8))
    return device_type, device_id


def answer_queries(mx: ModuleType, gpus: int | None) -> None:
    """Answer MXNet's functions that ask for the number of GPUs."""

    def count(result: Any) -> int:
        result._obj.value = gpus or 0
        return 0

    mx.base._LIB.MXGetGPUCount = count


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
