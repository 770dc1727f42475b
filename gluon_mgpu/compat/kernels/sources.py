"""Writes CUDA files that instantiate kernels of MXNet 1.9.1 by their mangled names, and nothing else."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from gluon_mgpu.support.errors import Error

COMMON = ("mxnet/base.h", "mshadow/tensor.h", *(f"operator/{name}.h" for name in ("mxnet_op", "mshadow_op")))
# (name of the file, pattern of its kernels' names, headers below src/). The first pattern that matches counts. Of a .cu
# file, only the part before its operators is used, because these would instantiate all of its kernels.
GROUPS = (
    (
        "sorting",
        "^void (cub|thrust)::",
        ("cub/cub.cuh", "thrust/device_vector.h", "thrust/sort.h", "thrust/system/cuda/execution_policy.h"),
    ),
    (
        "reduce",
        "broadcast::|pick|direct_copy|broadcast_kernel|reduce_axes_backward|ReduceWithAxis",
        (
            "operator/tensor/broadcast_reduce_op.h",
            "operator/tensor/broadcast_reduce-inl.cuh",
            "operator/tensor/elemwise_binary_broadcast_op.h",
        ),
    ),
    (
        "random",
        "Sample|rand_generator|[Dd]ropout|bernoulli",
        ("operator/random/sample_op.h", "operator/random/sample_multinomial_op.h", "common/random_generator.cu"),
    ),
    ("shuffle", "CopyForShuffle", ("operator/random/shuffle_op.cu",)),
    ("batch_norm", "batchnorm::", ("operator/nn/batch_norm.cu",)),
    ("layer_norm", "LayerNorm", ("operator/nn/layer_norm.cu",)),
    (
        "layers",
        "[Ss]oftmax|bias_kernel|AddBiasGrad|im2col|col2im|pool_|PartialSort|fill_ind|transpose_pseudo2D",
        (
            "operator/nn/softmax-inl.h",
            "operator/nn/fully_connected-inl.h",
            "operator/nn/im2col.cuh",
            "operator/nn/pool.cuh",
            "operator/tensor/pseudo2DTranspose_op-inl.cuh",
            "operator/tensor/ordering_op-inl.h",
        ),
    ),
    ("sequence_mask", "SequenceMask", ("operator/sequence_mask.cu",)),
    ("pad", "image_2d_pad", ("operator/pad.cu",)),
    ("optimizers", "SGD|Adam|RMSProp|NAG|Signum|Update", ("operator/optimizer_op-inl.h",)),
    (
        "indexing",
        "Take|Embedding|one_hot|gather_nd|scatter_nd|tcast_clip|batch_take|where|BooleanMask",
        (
            "operator/tensor/control_flow_op.h",
            "operator/contrib/boolean_mask-inl.h",
            "operator/tensor/indexing_op.cu",
        ),
    ),
    (
        "matrix",
        "slice|reverse|repeat|tile|eye_dns|range_fwd|linspace|clip|split|concat|stack|SwapAxis|quantize_2bit|smooth_l1",
        ("operator/tensor/matrix_op-inl.h", "operator/tensor/init_op.h", "kvstore/gradient_compression-inl.h"),
    ),
    (
        "elementwise",
        "mxnet_generic_kernel|MapPlan|MapReduce",
        (
            "operator/tensor/elemwise_unary_op.h",
            "operator/tensor/elemwise_binary_op.h",
            "operator/tensor/elemwise_binary_scalar_op.h",
            "operator/tensor/init_op.h",
            "operator/tensor/broadcast_reduce_op.h",
            "operator/tensor/elemwise_sum.h",
            "operator/tensor/ravel.h",
        ),
    ),
)
# A function that implements an operator; it would instantiate kernels for all types.
OPERATORS = re.compile(r"^template ?<>\n(?:inline )?void \w+<gpu>\(.*?^\}\n", re.M | re.S)
# The headers call BLAS on CPUs, which is not compiled here.
BLAS = """#pragma once
enum CBLAS_ORDER { CblasRowMajor = 101, CblasColMajor };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans };
enum CBLAS_UPLO { CblasUpper = 121, CblasLower };
enum CBLAS_DIAG { CblasNonUnit = 131, CblasUnit };
enum CBLAS_SIDE { CblasLeft = 141, CblasRight };
#define BLAS(name) template <class... T> float cblas_s##name(T...); template <class... T> double cblas_d##name(T...);
extern "C++" { BLAS(gemm) BLAS(gemv) BLAS(ger) BLAS(dot) BLAS(trsm) BLAS(trmm) BLAS(syrk) BLAS(axpy) BLAS(scal) }
"""


def write(names: Iterable[str], source: Path, folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Write a file GROUP.cu for each group of kernels. names: mangled. source: MXNet's folder.

    Returns the names in each group, and the declarations of those that no group can make.
    """
    names = list(dict.fromkeys(names))
    groups: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    unknown = []
    for name, declaration in zip(names, demangled(names)):
        group = next((group for group, pattern, _ in GROUPS if re.search(pattern, declaration)), "")
        if not group:
            unknown.append(declaration)
            continue
        groups.setdefault(group, []).append(name)
        if declaration.startswith("void "):  # others are not templates; their file defines them
            declared = declaration.replace("(anonymous namespace)::", "")
            lines.setdefault(group, []).append(f"template __global__ {declared};")
    for group, _, headers in GROUPS:
        if group in groups:
            included = [f'#include "{name}"' for name in COMMON] + [_include(source / "src", name) for name in headers]
            text = "\n".join([*included, *lines.get(group, ()), ""])
            (folder / f"{group}.cu").write_text(text)
    (folder / "cblas.h").write_text(BLAS)
    return groups, unknown


def demangled(names: list[str]) -> list[str]:
    """The C++ declarations of mangled names."""
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except OSError:
        raise Error("c++filt is missing on this machine: `apt install binutils` installs it") from None
    return done.stdout.splitlines()


def _include(source: Path, path: str) -> str:
    """A line that includes a header, or the part of a .cu file before its operators."""
    if not path.endswith(".cu"):
        return f'#include "{path}"'
    text, operators, _ = (source / path).read_text().partition("NNVM_REGISTER_OP")
    text = OPERATORS.sub("", text)
    beside = Path(path).parent
    text = re.sub(
        r'#include "(.*?)"',
        lambda match: f'#include "{beside / match[1]}"' if (source / beside / match[1]).exists() else match[0],
        text,
    )
    return text + "}}" * bool(operators and "}  // namespace op" not in text)  # closes mxnet and op
