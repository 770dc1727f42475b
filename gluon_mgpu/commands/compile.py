"""`gluon-mgpu compile`: build MXNet's kernels for a GPU that is newer than its wheels."""

from __future__ import annotations

from pathlib import Path

import click

from gluon_mgpu.commands import common
from gluon_mgpu.support.errors import Error
from gluon_mgpu.support.params import FOLDER


@common.command(
    examples="""
        gluon-mgpu compile ~/mxnet
        gluon-mgpu compile ~/mxnet --arch sm_90 --nvcc /usr/local/cuda-11.8/bin/nvcc --compiler g++-11
    """
)
@click.argument("source", type=FOLDER, metavar="MXNET")
@common.option(
    "--arch",
    default="compute_80",
    metavar="ARCH",
    help="compute_80: code for all GPUs of compute capability 8.0 or higher, "
    "which NVIDIA's driver compiles when it first runs. sm_90: machine code for 9.0 only.",
)
@common.option("--nvcc", default="nvcc", metavar="FILE", help="CUDA's compiler, version 11.8 or newer.")
@common.option(
    "--compiler", default="g++", metavar="FILE", help="The C++ compiler for nvcc. CUDA 11.8 needs g++ 11 or lower."
)
def compile(source: str, arch: str, nvcc: str, compiler: str) -> None:
    """Compile kernels for GPUs that are newer than MXNet 1.9.1's wheel mxnet-cu112, such as H100. The wheel itself
    stays unchanged: the first `import mxnet` finds the compiled kernels.

    MXNET is the folder with MXNet 1.9.1's sources. If a program needs a kernel that is missing, it says so; then run
    this command again.
    """
    from gluon_mgpu.compat.kernels import build

    try:
        library = build.build(Path(source), arch, nvcc, compiler)
    except OSError as error:
        raise Error(f"cannot use {error.filename} ({error.strerror}): use another folder") from None
    click.echo(f"wrote {library}: the wheel mxnet-cu112 now works on GPUs that {arch} supports")
