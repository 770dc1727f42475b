"""Writes a network in ONNX format: PyTorch's exporter traces the module that to_pytorch.py writes.

MXNet's own exporter is from 2021; it needs an onnx release from that time, and converts some layers wrongly.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from gluon_mgpu.convert.exported import Exported, last_line
from gluon_mgpu.convert.to_pytorch import PACKAGES as PYTORCH
from gluon_mgpu.convert.to_pytorch import run
from gluon_mgpu.convert.to_pytorch import write as write_module
from gluon_mgpu.support.errors import Error

SUFFIXES = (".onnx",)
PACKAGES = ("onnx", "onnxruntime", *PYTORCH)
USAGE = "load it with onnxruntime.InferenceSession('{prefix}.onnx')"


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
    Path(f"{base}.json").write_text(json.dumps(options), encoding="utf-8")
    run(network, base, "export")


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
