"""CUDA without a CUDA installation: opens the libraries of NVIDIA's wheels before mxnet-cu112 looks for them.

The driver's library is the only one that a machine must bring. docs/engine.md has what was measured. Nothing here
imports mxnet or NumPy.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path

from gluon_mgpu.runtime.errors import Error

DRIVER = "libcuda.so.1"
# What libmxnet.so of mxnet-cu112 needs, and what that needs: by wheel, as pip is to be asked for it. A library comes
# after those that it needs, so that it finds them open and looks for them nowhere else.
LIBRARIES = (
    ("nvidia-cuda-runtime-cu11", "libcudart.so.11.0"),
    ("nvidia-cuda-nvrtc-cu11", "libnvrtc.so.11.2"),
    ("nvidia-nvtx-cu11", "libnvToolsExt.so.1"),
    ("nvidia-cublas-cu11", "libcublasLt.so.11", "libcublas.so.11"),
    ("nvidia-cufft-cu11", "libcufft.so.10"),
    ("nvidia-curand-cu11", "libcurand.so.10"),
    ("nvidia-cusolver-cu11", "libcusolver.so.11"),
    (
        "nvidia-cudnn-cu11<9",
        "libcudnn.so.8",
        # Its parts, which it opens when the first convolution runs: from LD_LIBRARY_PATH, where that has others.
        "libcudnn_ops_infer.so.8",
        "libcudnn_ops_train.so.8",
        "libcudnn_cnn_infer.so.8",
        "libcudnn_cnn_train.so.8",
        "libcudnn_adv_infer.so.8",
        "libcudnn_adv_train.so.8",
    ),
    ("nvidia-nccl-cu11", "libnccl.so.2"),
)
AGAIN = "pip install --force-reinstall --no-deps"  # also where pip takes a wheel for installed whose files are gone
CHECKS = "MXNET_CUDA_LIB_CHECKING"
WHEEL = re.compile(r"(mxnet(?:_(?:mkl|native|cu\d+(?:mkl)?))?)-([^-]+)\.dist-info")


def prepare() -> None:
    """Open what mxnet-cu112 needs; with another MXNet it does nothing. Call it before the first `import mxnet`.

    Raises Error where two of MXNet's wheels are installed, where the driver or a library is missing.
    """
    refuse_two_wheels()
    if "mxnet-cu112" in wheels():
        lines = missing()
        if lines:
            raise Error(lines[0])
        # Without a GPU the first backward pass would say "GPU context requested", also where nobody did.
        os.environ.setdefault(CHECKS, "0")


def refuse_two_wheels() -> None:
    """Raises Error where two of MXNet's wheels are installed in one folder: the files of one lie over the other's."""
    names = list(wheels())
    if len(names) > 1:
        raise Error(
            f"{' and '.join(names)} are both installed, and both write the folder mxnet: run "
            f"`pip uninstall -y {' '.join(names)}`, then `pip install --no-deps mxnet==1.9.1` or, for NVIDIA's GPUs, "
            "`pip install --no-deps mxnet-cu112==1.9.1`"
        )


def wheels() -> dict[str, str]:
    """{name: version} of MXNet's wheels in the folder that `import mxnet` would read: usually one."""
    spec = importlib.util.find_spec("mxnet")
    if spec is None or not spec.submodule_search_locations:
        return {}
    beside = Path(spec.submodule_search_locations[0]).parent.glob("mxnet*.dist-info")
    found = (WHEEL.fullmatch(path.name) for path in sorted(beside))
    return {match[1].replace("_", "-"): match[2] for match in found if match}


def missing() -> list[str]:
    """A line for each thing that mxnet-cu112 needs and cannot have, with what to do; none where all is there.

    What is there is open from now on, for the whole process.
    """
    lines, absent = [], {}
    try:
        _open(DRIVER)
    except OSError as error:
        why = "is not there" if _is_absent(DRIVER, error) else f"cannot be opened ({error})"
        lines.append(
            f"{DRIVER} {why}: mxnet-cu112 needs NVIDIA's driver, on CPU contexts too. Install the driver, or the CPU "
            "wheel: `pip uninstall -y mxnet-cu112 && pip install --no-deps mxnet==1.9.1`"
        )
    for wheel, *libraries in LIBRARIES:
        ours = _libraries_of(wheel)
        for library in libraries:
            # The wheel's own goes before the system's: pip chose its wheels to fit each other, and parts of two CUDA
            # installations in one process do not.
            path = ours.get(library, library)
            try:
                _open(path)
            except OSError as error:
                if _is_absent(library, error):
                    absent[library] = wheel
                elif str(error).startswith(path):
                    lines.append(f"{error}: run `{AGAIN} '{wheel}'`")
                else:
                    lines.append(f"{path} needs a library that this machine does not have: {error}")
    if absent:
        needed = " ".join(f"'{wheel}'" if "<" in wheel else wheel for wheel in dict.fromkeys(absent.values()))
        lines.append(f"mxnet-cu112 needs {', '.join(absent)}, and nothing here has that: run `{AGAIN} {needed}`")
    return lines


def _libraries_of(wheel: str) -> dict[str, str]:
    """{name: path} of the libraries in an installed wheel."""
    try:
        files = metadata.distribution(wheel.partition("<")[0]).files or ()
    except metadata.PackageNotFoundError:
        return {}
    return {file.name: str(file.locate()) for file in files if ".so" in file.name}


def _open(library: str) -> None:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)


def _is_absent(library: str, error: OSError) -> bool:
    return str(error).startswith(f"{library}: cannot open shared object file")
