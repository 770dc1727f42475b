"""Writes a network in ONNX format with MXNet's own exporter.

The exporter is from 2021. It reads a table that the onnx package no longer has, and declares the newest opset although
it writes operators of opset 13. `_as_in_2021` fixes both during the export; onnx's own converter then updates the model
to OPSET.
"""

from __future__ import annotations

import contextlib
import json
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import mxnet as mx
import numpy as np

from gluon_mgpu.convert.network import Network, refuse
from gluon_mgpu.runtime import errors
from gluon_mgpu.runtime.errors import Error

SUFFIXES = (".onnx",)
PACKAGES = ("onnx", "onnxruntime")
USAGE = "load it with onnxruntime.InferenceSession('{prefix}.onnx')"
EXPORTED = 13  # the opset of MXNet's exporter
OPSET = 21  # the opset of the written file
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64")


def write(network: Network, base: str) -> None:
    """Write BASE.onnx, which accepts any batch size.

    Raises UsageError for the first operator that cannot be converted.
    """
    import onnx
    from onnx import checker, helper, version_converter

    supported, graph = mx.onnx.get_operator_support(EXPORTED), json.loads(network.symbol.tojson())
    for node in graph["nodes"]:
        if node["op"] not in supported:
            raise refuse(node, "ONNX")
        if node.get("attrs", {}).get("layout") == "NCW":
            del node["attrs"]["layout"]  # the exporter rejects NCW, but converts the layer if no layout is given
    symbol = mx.sym.load_json(json.dumps(graph))
    shape, path = network.images.shape[1:], f"{base}.onnx"
    batches = {"dynamic": True, "dynamic_input_shapes": [("n", *shape)]}
    try:
        with _as_in_2021():
            mx.onnx.export_model(symbol, network.params, [(1, *shape)], np.float32, path, **batches)
    except Exception as error:  # unsupported attributes raise exceptions of many types
        raise Error(f"MXNet's ONNX exporter failed: {errors.reason(error)}") from None
    model = onnx.load(path)
    _repair(model.graph, network)
    model = version_converter.convert_version(model, OPSET)
    model.ir_version = helper.find_min_ir_version_for(model.opset_import)
    checker.check_model(model, full_check=True)
    onnx.save(model, path)


def _repair(graph: Any, network: Network) -> None:
    """Remove unused constants, remove parameters from the inputs, and align the slopes of PReLU with the channels."""
    shapes = network.shapes()
    ranks = {node.input[1]: len(shapes[node.name]) for node in graph.node if node.op_type == "PRelu"}
    used = {name for node in graph.node for name in node.input}
    inputs = [value for value in graph.input if value.name == network.input]
    constants = [array for array in graph.initializer if array.name in used]
    for array in constants:
        array.dims.extend([1] * (ranks.get(array.name, 2) - 2))  # (c,) -> (c, 1, 1)
    for field, values in ((graph.input, inputs), (graph.initializer, constants)):
        del field[:]
        field.extend(values)


@contextlib.contextmanager
def _as_in_2021() -> Iterator[None]:
    """Temporarily patch onnx to match what the exporter expects."""
    import onnx

    numbers = {np.dtype(name): onnx.helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in DTYPES}

    def make_tensor(name: str, data_type: int, dims: Any, vals: Any, raw: bool = False) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(
            np.array(vals, mapping.TENSOR_TYPE_TO_NP_TYPE[data_type]).reshape(dims), name
        )

    mapping = types.SimpleNamespace(
        NP_TYPE_TO_TENSOR_TYPE=numbers, TENSOR_TYPE_TO_NP_TYPE={number: dtype for dtype, number in numbers.items()}
    )
    with (
        mock.patch.object(onnx, "mapping", mapping, create=True),
        mock.patch.object(onnx.defs, "onnx_opset_version", lambda: EXPORTED),
        mock.patch.object(onnx.checker, "check_graph"),  # the check would use the newest opset
        mock.patch.object(onnx.helper, "make_tensor", make_tensor),  # makes the export of AlexNet 5 times as fast
    ):
        yield


def scores(network: Network, base: str) -> np.ndarray:
    """Load BASE.onnx in ONNX Runtime, and compute the scores of the network's images."""
    import onnxruntime

    session = onnxruntime.InferenceSession(f"{base}.onnx", providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, {network.input: X})[0] for X in network.batches()])
