"""Lets mxnet-cu112 run without a CUDA installation: opens the libraries in NVIDIA's wheels before MXNet needs them.

The machine needs only NVIDIA's driver. This module imports neither mxnet nor NumPy.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from importlib.machinery import PathFinder
from pathlib import Path

from gluon_mgpu.support.errors import Error

DRIVER = "libcuda.so.1"
# cuDNN opens these at the first convolution. If they are not open yet, it may find other versions in LD_LIBRARY_PATH.
CUDNN_PARTS = [f"libcudnn_{part}_{use}.so.8" for part in ("ops", "cnn", "adv") for use in ("infer", "train")]
# Libraries that mxnet-cu112 needs, directly or indirectly: (pip requirement, library, ...). A library comes after
# its dependencies, which are then already open.
LIBRARIES = (
    ("nvidia-cuda-runtime-cu11", "libcudart.so.11.0"),
    ("nvidia-cuda-nvrtc-cu11", "libnvrtc.so.11.2"),
    ("nvidia-nvtx-cu11", "libnvToolsExt.so.1"),
    ("nvidia-cublas-cu11", "libcublasLt.so.11", "libcublas.so.11"),
    ("nvidia-cufft-cu11", "libcufft.so.10"),
    ("nvidia-curand-cu11", "libcurand.so.10"),
    ("nvidia-cusolver-cu11", "libcusolver.so.11"),
    ("nvidia-cudnn-cu11<9", "libcudnn.so.8", *CUDNN_PARTS),
    ("nvidia-nccl-cu11", "libnccl.so.2"),
)
KERNELS = range(5, 9)  # major compute capabilities that the wheel has kernels for (docs/install.md)
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# Each makes MXNet print lines. The first two warn of versions that work, and that there is no GPU. With the last one,
# MXNet tries each convolution's algorithms, so that timing decides how a sum is rounded.
QUIET = ("MXNET_CUDA_LIB_CHECKING", "MXNET_CUDNN_LIB_CHECKING", "MXNET_CUDNN_AUTOTUNE_DEFAULT")
WHEEL = re.compile(r"(mxnet(?:_(?:mkl|native|cu\d+(?:mkl)?))?)-([^-]+)\.dist-info")


def open_libraries() -> None:
    """If mxnet-cu112 is installed, open the libraries that it needs. Call this before the first `import mxnet`.

    Raises Error if the driver or a library is missing, or if two MXNet wheels, which overwrite each other's files, are
    installed in one folder.
    """
    names = list(wheels())
    if len(names) > 1:
        both = f"{' and '.join(names)} are both installed and overwrite each other's files"
        raise Error(f"{both}: run `pip uninstall -y {' '.join(names)}`, then install the one that you need")
    if names != ["mxnet-cu112"]:
        return
    for name in QUIET:
        os.environ.setdefault(name, "0")
    kernels = built_kernels()
    if kernels and any(major not in KERNELS for _, major, _ in driver_gpus()):
        try:
            _open(str(kernels))  # before all others, so that MXNet registers its kernels there
        except OSError as error:
            raise Error(f"{error}: run `gluon-mgpu compile MXNET` again (docs/install.md)") from error
        # MXNet would compile joined operators with NVRTC, which may not know this GPU.
        os.environ.setdefault("MXNET_USE_FUSION", "0")
    try:
        _open(DRIVER)
    except OSError as error:
        cpu = "`pip uninstall -y mxnet-cu112 && pip install --no-deps mxnet==1.9.1`"
        raise Error(f"{error}: mxnet-cu112 needs NVIDIA's driver; install it, or the wheel for CPUs: {cpu}") from error
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    in_wheels = {path.name: str(path) for folder in reversed(folders) for path in folder.glob("*/lib/*.so*")}
    failures = {}
    for wheel, *libraries in LIBRARIES:
        for library in libraries:
            try:
                # Prefer the wheel's library, because libraries from different CUDA versions do not work together.
                _open(in_wheels.get(library, library))
            except OSError:
                failures[library] = f"'{wheel}'"
    if failures:
        # --force-reinstall is needed because pip considers a wheel installed even if its files are gone.
        pip = f"pip install --force-reinstall --no-deps {' '.join(dict.fromkeys(failures.values()))}"
        raise Error(f"mxnet-cu112 cannot open {', '.join(failures)}: run `{pip}`")


def _open(library: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def kernels_folder() -> Path:
    """The folder in which `gluon-mgpu compile` builds kernels for newer GPUs."""
    import platformdirs  # not at the top, because few machines need this

    return platformdirs.user_cache_path("gluon_mgpu") / "kernels"


def built_kernels() -> Path | None:
    """The library that `gluon-mgpu compile` built, if any. It is named after nvcc's architecture: sm_90.so is for
    compute capability 9.x, compute_80.so for 8.0 and newer."""
    return next(kernels_folder().glob("*_*.so"), None)


def has_kernels(major: int, minor: int) -> bool:
    """Whether the wheel, or the library that was built, has kernels for a GPU of compute capability major.minor."""
    library = built_kernels() if major not in KERNELS else None
    if library is None:
        return major in KERNELS
    kind, _, number = library.stem.partition("_")
    return 10 * major + minor >= int(number) and (kind == "compute" or major == int(number) // 10)


def driver_gpus() -> list[tuple[str, int, int]]:
    """Ask NVIDIA's driver for its GPUs, by index. MXNet uses the same indices. Returns (name, major, minor) of each;
    major.minor is its compute capability. Raises Error if the driver fails."""
    try:
        driver = ctypes.CDLL(DRIVER)
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


def wheels() -> dict[str, str]:
    """Find the MXNet wheels in the folder that `import mxnet` uses. Returns {name: version}, normally only one."""
    spec = PathFinder.find_spec("mxnet")
    if spec is None or not spec.submodule_search_locations:
        return {}
    beside = Path(spec.submodule_search_locations[0]).parent.glob("mxnet*.dist-info")
    matches = (WHEEL.fullmatch(path.name) for path in sorted(beside))
    return {match[1].replace("_", "-"): match[2] for match in matches if match}
