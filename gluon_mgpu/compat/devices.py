"""Finds the MXNet contexts for `--gpus 2` or `--gpus 0,2`: GPUs if there are any, else CPU contexts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gluon_mgpu.compat import cuda, startup
from gluon_mgpu.compat.cuda import driver_gpus
from gluon_mgpu.runtime import errors, log
from gluon_mgpu.runtime.errors import Error, UsageError

if TYPE_CHECKING:
    from mxnet import Context

DEVICES = ("auto", "gpu", "cpu")
MOST = 1024  # limit on indices; MXNet's tables grow with the largest index, and a huge table would not fit in memory


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
    driver = driver_gpus() if any(name.startswith("mxnet-cu") for name in cuda.wheels()) else []
    for index in indices if driver else ():
        name, major, minor = driver[min(index, len(driver) - 1)]  # one GPU may be shown as several
        if not cuda.has_kernels(major, minor):
            gpu = f"GPU {index}, {name}, has compute capability {major}.{minor}"
            raise Error(f"{gpu}: {no_kernels(major)}, or use {errors.setting('device', 'cpu')}")
    return [mx.gpu(i) for i in indices]


def no_kernels(major: int) -> str:
    """Why MXNet does not work on a GPU of this major compute capability, and what to do."""
    has = f"mxnet-cu112 has kernels for {cuda.KERNELS[0]}.x to {cuda.KERNELS[-1]}.x only"
    build = f"`{errors.command('compile MXNET')}` builds them from MXNet's sources"
    return f"{has}; {build if major > cuda.KERNELS[-1] else 'use a newer GPU'} (docs/install.md)"


def say_if_no_gpu(ctx: list[Context], device: str) -> None:
    """If `device` is "auto" and training runs on CPU contexts, print why. Call this when training starts."""
    if device == "auto" and ctx[0].device_type == "cpu":
        log.say(f"training on {len(ctx)} CPU context{'s'[: len(ctx) > 1]}, because {_why_no_gpu()}")


def _why_no_gpu() -> str:
    import mxnet as mx

    if not mx.runtime.Features().is_enabled("CUDA"):
        return "the installed MXNet is the build for CPUs"
    return "this machine has no GPU that MXNet can use"
