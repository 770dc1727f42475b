"""Finds the MXNet contexts for `--gpus 2` or `--gpus 0,2`: GPUs if there are any, else CPU contexts."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gluon_mgpu.compat import cuda, startup
from gluon_mgpu.runtime import errors, log
from gluon_mgpu.runtime.errors import Error, UsageError

if TYPE_CHECKING:
    from mxnet import Context

DEVICES = ("auto", "gpu", "cpu")
MOST = 1024  # limit on indices; MXNet's tables grow with the largest index, and a huge table would not fit in memory
KERNELS = range(5, 9)  # major compute capabilities that MXNet 1.9.1's wheels support (docs/engine.md)
NEW = range(9, 13)  # those for which there are other builds
NEWER = ", MXNet 2's community fork, or NVIDIA's container 24.06 for up to 9.0 (docs/install.md)"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def parse(given: int | str | Sequence[int], name: str = "gpus", first: int = 0, below: int = MOST) -> list[int]:
    """Parse a count or a list of distinct numbers: "2" -> [first, first + 1]; "0,2" -> [0, 2]; "2," -> [2].

    Raises UsageError for anything else, for more than 1024 numbers, or if a number is not in range(below). name: the
    setting in the error message.
    """
    text = str(given)
    try:
        if isinstance(given, (list, tuple)):
            numbers = [operator.index(number) for number in given]
        elif "," in text:
            numbers = [int(part) for part in text.strip().removesuffix(",").split(",")]
        else:
            numbers = list(range(first, first + min(int(text), MOST + 1)))
    except (TypeError, ValueError):
        numbers = []
    distinct = len(set(numbers)) == len(numbers)
    if not (distinct and 1 <= len(numbers) <= MOST and all(0 <= number < below for number in numbers)):
        advice = f"must be a number from 1 to {MOST}, such as 2, or distinct numbers below {below}, such as 0,2"
        raise UsageError(name, given, advice)
    return numbers


def contexts(gpus: int | str | Sequence[int], device: str = "auto") -> list[Context]:
    """Find the contexts to train on.

    gpus: number of devices (2), indices ([0, 2]), or the value of --gpus. device: "gpu", "cpu", or "auto", which means
    GPUs if MXNet finds any, else CPU contexts (`say_if_no_gpu` prints a notice).
    Raises UsageError if a device does not exist, Error if MXNet has no kernels for a GPU or if the CPU contexts could
    hang (`startup.check_contexts`).
    """
    if device not in DEVICES:
        raise UsageError("device", device, f"must be one of {', '.join(DEVICES)}")
    indices = parse(gpus)
    startup.configure(len(indices))
    import mxnet as mx

    count = mx.context.num_gpus() if device != "cpu" else 0
    if count == 0:
        if device == "gpu":
            raise UsageError("device", device, f"{_why_no_gpu()}; use {errors.setting('device', 'cpu')}")
        ctx = [mx.cpu(i) for i in indices]
        startup.check_contexts(ctx)
        return ctx
    if max(indices) >= count:
        has = "1 GPU (index 0)" if count == 1 else f"{count} GPUs (indices 0 to {count - 1})"
        advice = f"this machine has {has}; use available GPUs, or {errors.setting('device', 'cpu')}"
        raise UsageError("gpus", indices, advice)
    driver = driver_gpus()
    for index in indices if any(name.startswith("mxnet-cu") for name in cuda.wheels()) else ():
        name, major, minor = driver[index]
        if major not in KERNELS:
            gpu = f"GPU {index}, {name}, has compute capability {major}.{minor}"
            has = f"MXNet 1.9.1's wheels have kernels for {KERNELS[0]}.x to {KERNELS[-1]}.x only"
            raise Error(f"{gpu}: {has}; use {errors.setting('device', 'cpu')}{NEWER * (major in NEW)}")
    return [mx.gpu(i) for i in indices]


def say_if_no_gpu(ctx: list[Context], device: str) -> None:
    """If `device` is "auto" and training runs on CPU contexts, print why. Call this when training starts."""
    if device == "auto" and ctx[0].device_type == "cpu":
        log.say(f"training on {len(ctx)} CPU context{'s'[: len(ctx) > 1]}, because {_why_no_gpu()}")


def _why_no_gpu() -> str:
    import mxnet as mx

    if not mx.runtime.Features().is_enabled("CUDA"):
        return "the installed MXNet is the build for CPUs"
    return "this machine has no GPU that MXNet can use"


def driver_gpus() -> list[tuple[str, int, int]]:
    """Ask NVIDIA's driver for its GPUs, by index. MXNet uses the same indices. Returns (name, major, minor) of each;
    major.minor is its compute capability. Raises Error if the driver fails."""
    try:
        driver = ctypes.CDLL(cuda.DRIVER)
    except OSError:
        return []
    count, handle, major, minor = (ctypes.c_int() for _ in range(4))
    name, gpus = ctypes.create_string_buffer(96), []
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        status = (
            status
            or driver.cuDeviceGet(ctypes.byref(handle), index)
            or driver.cuDeviceGetName(name, len(name), handle)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), 75, handle)  # ..._COMPUTE_CAPABILITY_MAJOR
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, handle)  # ..._COMPUTE_CAPABILITY_MINOR
        )
        gpus.append((name.value.decode(), major.value, minor.value))
    if status and status != NO_DEVICE:
        raise Error(f"the NVIDIA driver returned error {status}; run nvidia-smi for details")
    return gpus
