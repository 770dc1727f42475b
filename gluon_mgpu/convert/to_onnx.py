"""Writes a network in ONNX format: PyTorch's exporter traces the module that to_pytorch.py writes.

MXNet's own exporter is from 2021; it needs an onnx release from that time, and converts some layers wrongly.
"""

from __future__ import annotations

import numpy as np

from gluon_mgpu.convert.exported import Exported, last_line
from gluon_mgpu.convert.to_pytorch import PACKAGES as PYTORCH
from gluon_mgpu.convert.to_pytorch import load_and_run
from gluon_mgpu.convert.to_pytorch import write as write_module
from gluon_mgpu.support.errors import Error

SUFFIXES = (".onnx",)
PACKAGES = ("onnx", "onnxruntime", *PYTORCH)
USAGE = "load it with onnxruntime.InferenceSession('{prefix}.onnx')"
OPSET = 17

# Exports `net` with the given `options`
EXPORT = """
import math
import warnings

warnings.simplefilter("ignore")  # the exporter warns that it is no longer developed, and about sizes that vary


def constant(g, value):
    return g.op("Constant", value_t=torch.tensor(value))


# Operators that the exporter lacks
symbolics = {name: lambda g, x, op=name.title(): g.op(op, x) for name in ("cosh", "sinh", "acosh", "asinh", "atanh")}
symbolics["trunc"] = lambda g, x: g.op("Mul", g.op("Sign", x), g.op("Floor", g.op("Abs", x)))
symbolics["expm1"] = lambda g, x: g.op("Sub", g.op("Exp", x), constant(g, 1.0))
symbolics["rad2deg"] = lambda g, x: g.op("Mul", x, constant(g, 180 / math.pi))
symbolics["deg2rad"] = lambda g, x: g.op("Mul", x, constant(g, math.pi / 180))
for name, symbolic in symbolics.items():
    torch.onnx.register_custom_op_symbolic(f"aten::{name}", symbolic, options["opset_version"])


def means(n, count):  # a matrix, whose product with n numbers is their adaptive pooling
    ends = [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
    return torch.tensor([[(start <= k < end) / (end - start) for k in range(n)] for start, end in ends])


def adaptive_avg_pool2d(x, size, pool=torch.nn.functional.adaptive_avg_pool2d):  # the exporter needs a divisor
    if size == 1:
        return pool(x, size)
    height, width = (size, size) if isinstance(size, int) else size
    return means(int(x.shape[2]), height) @ x @ means(int(x.shape[3]), width).T


torch.nn.functional.adaptive_avg_pool2d = adaptive_avg_pool2d
try:
    torch.onnx.export(net, tuple(list(samples.values())[-1]), base + ".onnx", dynamo=False, **options)
except Exception as error:
    sys.exit(f"error: {str(error).strip().splitlines()[0].partition('. Please')[0]}")
"""


def write(network: Exported, base: str) -> None:
    """Write BASE.onnx, which accepts any batch size, and other image sizes if the network does.

    Exceptions: see `to_pytorch.write`.
    """
    write_module(network, base)
    axes = {
        name: {k: size for k, size in enumerate(network.axes(name)) if isinstance(size, str)} for name in network.inputs
    }
    network.compute()
    if "n" in axes[network.inputs[0]].values():
        axes |= {name: {network.batch_axis(k): "n"} for k, name in enumerate(network.outputs)}
    options = {"input_names": network.inputs, "output_names": network.outputs, "dynamic_axes": axes}
    load_and_run(network, base, f"options = {{**{options!r}, 'opset_version': {OPSET}}}\n{EXPORT}")


def outputs(network: Exported, base: str) -> list[list[np.ndarray]]:
    """Load BASE.onnx in ONNX Runtime, and compute the outputs for each sample."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(f"{base}.onnx", options, providers=["CPUExecutionProvider"])
        return [session.run(None, dict(zip(network.inputs, sample.inputs))) for sample in network.samples]
    except Exception as error:  # ONNX Runtime raises many exception types
        raise Error(f"ONNX Runtime: {last_line(error)}") from None
