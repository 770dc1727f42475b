"""Finds the MXNet contexts for `--gpus 2` or `--gpus 0,2`: GPUs if there are enough, else CPU contexts."""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import permutations
from typing import TYPE_CHECKING

from gluon_mgpu.compat import cuda, startup
from gluon_mgpu.support import errors, log
from gluon_mgpu.support.errors import Error, UsageError

if TYPE_CHECKING:
    from mxnet import Context

DEVICES = ("auto", "gpu", "cpu")
MOST = 1024  # limit on indices; MXNet's tables grow with the largest index, and a huge table would not fit in memory


def parse(given: int | str | Sequence[int]) -> list[int]:
    """Parse a count or a list of distinct indices: "2" -> [0, 1]; "0,2" -> [0, 2]; "2," -> [2].

    Raises UsageError for anything else, or if a count or an index is above 1024 or 1023.
    """
    text = str(given)
    try:
        if isinstance(given, (list, tuple)):
            numbers = [] if bool in map(type, given) else [operator.index(number) for number in given]
        elif "," in text:
            numbers = [int(part) for part in text.strip().removesuffix(",").split(",")]
        else:
            numbers = list(range(min(int(text), MOST + 1)))
    except (TypeError, ValueError):
        numbers = []
    distinct = len(set(numbers)) == len(numbers)
    if not (distinct and 1 <= len(numbers) <= MOST and all(0 <= number < MOST for number in numbers)):
        advice = f"must be a number from 1 to {MOST}, such as 2, or distinct numbers below {MOST}, such as 0,2"
        raise UsageError("gpus", given, advice)
    return numbers


def contexts(gpus: int | str | Sequence[int], device: str = "auto") -> list[Context]:
    """Find the contexts to train on.

    gpus: number of devices (2), indices ([0, 2]), or the value of --gpus. device: "gpu", "cpu", or "auto", which means
    GPUs if MXNet finds all of these, else CPU contexts. With too few GPUs, a notice says so; with none,
    `say_if_no_gpu` prints the notice.
    Raises UsageError if a device does not exist, Error if MXNet has no kernels for a GPU or if the CPU contexts could
    hang (`startup.check_contexts`).
    """
    if not isinstance(device, str) or device not in DEVICES:
        raise UsageError("device", device, f"must be one of {', '.join(DEVICES)}")
    indices = parse(gpus)
    startup.configure(len(indices))
    import mxnet as mx

    count = mx.context.num_gpus() if device != "cpu" else 0
    if device == "gpu" and count == 0:
        raise UsageError("device", device, f"{_why_no_gpu()}; use {errors.setting('device', 'cpu')}")
    if max(indices) >= count:
        has = "1 GPU (index 0)" if count == 1 else f"{count} GPUs (indices 0 to {count - 1})"
        if device == "gpu":
            advice = f"this machine has {has}; use available GPUs, or {errors.setting('device', 'cpu')}"
            raise UsageError("gpus", indices, advice)
        ctx = [mx.cpu(i) for i in indices]
        startup.check_contexts(ctx)
        if count:
            cpu = f"{len(ctx)} CPU {log.plural(len(ctx), 'context')}"
            advice = f"{errors.setting('gpus', count)} uses {'it' if count == 1 else 'them'}"
            log.say(f"using {cpu}, because this machine has only {has}; {advice}")
        return ctx
    for index, (name, major, minor) in enumerate(cuda.driver_gpus()):  # one GPU may be shown as several
        if index in indices and (reason := missing_kernels(major, minor)):
            gpu = f"GPU {index}, {name}, compute capability {major}.{minor}"
            raise Error(f"{gpu}: {reason}, or use {errors.setting('device', 'cpu')}")
    if len(indices) > 1 and not _direct_access(indices):
        os.environ.setdefault("MXNET_ENABLE_GPU_P2P", "0")  # or MXNet warns of it in a line for each GPU
    return [mx.gpu(i) for i in indices]


def missing_kernels(major: int, minor: int) -> str:
    """Why MXNet does not work on a GPU of compute capability major.minor, and what to do. Empty if it has kernels for
    it, or if it was not installed from a wheel for CUDA."""
    if cuda.has_kernels(major, minor) or not any(name.startswith("mxnet-cu") for name in cuda.wheels()):
        return ""
    has = f"mxnet-cu112 has kernels for {cuda.KERNELS[0]}.x to {cuda.KERNELS[-1]}.x only"
    build = f"`{errors.command('compile MXNET')}` builds them from MXNet's sources"
    return f"{has}; {build if major > cuda.KERNELS[-1] else 'use a newer GPU'} (docs/install.md)"


def try_gpu(index: int) -> str:
    """Multiply two matrices and compute a convolution on a GPU. Returns what was computed.

    Raises Error if a result is wrong, UsageError if MXNet finds no such GPU, and MXNetError if MXNet fails.
    """
    [gpu] = contexts([index], "gpu")
    import numpy as np
    from mxnet import nd

    matrix, images, weight = (nd.array(np.ones(shape), gpu) for shape in ((9, 9), (2, 3, 9, 9), (4, 3, 5, 5)))
    convolved = nd.Convolution(images, weight, no_bias=True, kernel=(5, 5), num_filter=4)
    for name, result, right in (("product", nd.dot(matrix, matrix), 9), ("convolution", convolved, 3 * 5 * 5)):
        if (result.asnumpy() != right).any():
            raise Error(f"a {name} is wrong")
    return "a product and a convolution are right"


def _direct_access(indices: Sequence[int]) -> bool:
    """Whether one of these GPUs can read another one's memory."""
    with suppress(OSError):
        driver, access = ctypes.CDLL(cuda.DRIVER), ctypes.c_int()
        return any(
            driver.cuDeviceCanAccessPeer(ctypes.byref(access), one, other) == 0 and access.value  # handles are indices
            for one, other in permutations(indices, 2)
        )
    return False


def say_if_no_gpu(ctx: list[Context], device: str) -> None:
    """If training runs on CPU contexts because there is no GPU, say so. Call this when training starts."""
    import mxnet as mx

    if device == "auto" and mx.context.num_gpus() == 0:
        log.say(f"training on {len(ctx)} CPU {log.plural(len(ctx), 'context')}, because {_why_no_gpu()}")


def _why_no_gpu() -> str:
    import mxnet as mx

    if not mx.runtime.Features().is_enabled("CUDA"):
        return "the installed MXNet is a CPU build"
    return "this machine has no GPU that MXNet can use"
