"""From `--gpus 2` or `--gpus 0,2` to MXNet contexts: on GPUs where there are any, else on as many CPU contexts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from gluon_mgpu import engine
from gluon_mgpu.distributed import place
from gluon_mgpu.errors import Error, UsageError

if TYPE_CHECKING:
    from mxnet import Context

DEVICES = ("auto", "gpu", "cpu")
MOST = 1024  # MXNet keeps tables by device index: a wild one would fill the memory
KERNELS = range(5, 9)  # major compute capabilities that mxnet-cu112 1.9.1 holds kernels for: docs/engine.md
KERNELS_FOR = f"{KERNELS[0]}.x to {KERNELS[-1]}.x"


def parse(text: int | str | Sequence[int]) -> list[int]:
    """Device indices from the text of --gpus: "2" -> [0, 1]; "0,2" -> [0, 2]; "2," -> [2]. A list is taken as it is.

    Raises UsageError for words, a count below 1, a negative index and an index that comes twice.
    """
    if isinstance(text, (list, tuple)):
        return _checked(list(text), f"devices {text}")
    parts = [part.strip() for part in str(text).split(",")]
    if len(parts) > 1 and parts[-1] == "":
        parts.pop()
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise UsageError(f"--gpus {text}: give how many devices (2) or which ones (0,2)") from None
    if "," in str(text):
        return _checked(numbers, f"--gpus {text}")
    if not 1 <= numbers[0] <= MOST:
        raise UsageError(f"--gpus {text}: give at least 1 device and at most {MOST}")
    return list(range(numbers[0]))


def _checked(indices: list[int], asked: str) -> list[int]:
    for index in indices:
        if not 0 <= index < MOST:
            raise UsageError(f"{asked}: there is no device {index}; indices go from 0 to {MOST - 1}")
        if indices.count(index) > 1:
            raise UsageError(f"{asked}: device {index} is named twice; name each one once")
    return indices


def contexts(gpus: int | str | Sequence[int], device: str = "auto", fewer: bool = False) -> list[Context]:
    """The contexts to train on.

    gpus: how many devices (2), which ones ([0, 2]), or the text of --gpus. device: "gpu", "cpu", or "auto": GPUs where
    this machine and this MXNet have any, else CPU contexts, which a line on standard error says. fewer: leave out GPUs
    that are not there, which a line says too, as long as one of them is.
    Raises UsageError for devices that are not there, Error for a GPU that MXNet has no kernels for and for CPU contexts
    that would hang (engine.check).
    """
    if device not in DEVICES:
        raise UsageError(f"device {device!r}: choose one of {', '.join(DEVICES)}")
    indices = parse(gpus)
    engine.configure(len(indices))
    import mxnet as mx

    count = mx.context.num_gpus() if device != "cpu" else 0
    if count == 0:
        if device == "gpu":
            raise UsageError(
                f"--device gpu: {_why_no_gpu(mx)}; docs/install.md has GPUs, and --device cpu trains without"
            )
        ctx = [mx.cpu(i) for i in indices]
        engine.check(ctx)
        if device == "auto":
            place.say(f"{_why_no_gpu(mx)}: using {len(ctx)} CPU context{'s'[: len(ctx) > 1]}")
        return ctx
    if max(indices) >= count:
        has = "1 GPU, index 0" if count == 1 else f"{count} GPUs, indices 0 to {count - 1}"
        asked = f"{len(indices)} GPUs" if indices == list(range(len(indices))) else f"GPU {max(indices)}"
        there = [i for i in indices if i < count]
        if not (fewer and there):
            raise UsageError(f"{asked} asked for, and this machine has {has}; --device cpu takes any number")
        place.say(f"{asked} asked for, and this machine has {has}: going on with {len(there)}")
        indices = there
    for index in indices:
        _refuse_gpu_without_kernels(index)
    return [mx.gpu(i) for i in indices]


def _why_no_gpu(mx: ModuleType) -> str:
    if not mx.runtime.Features().is_enabled("CUDA"):
        return "this MXNet is built without CUDA"
    return "this machine has no GPU that MXNet can see"


def _refuse_gpu_without_kernels(index: int) -> None:
    name, major, minor = _gpu(index)
    if major not in KERNELS:
        raise Error(
            f"GPU {index}, {name}, has compute capability {major}.{minor}: MXNet 1.9.1 has kernels for "
            f"{KERNELS_FOR} only; --device cpu trains without it"
        )


def _gpu(index: int) -> tuple[str, int, int]:
    """(name, major, minor compute capability) of a GPU, from the driver, which numbers GPUs as MXNet does."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(96)
    status = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(handle), index)
        or driver.cuDeviceGetName(name, len(name), handle)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # ..._COMPUTE_CAPABILITY_MAJOR
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # ..._COMPUTE_CAPABILITY_MINOR
    )
    if status:
        raise Error(f"GPU {index}: the NVIDIA driver answers with error {status}; nvidia-smi may say more")
    return name.value.decode(), major.value, minor.value
