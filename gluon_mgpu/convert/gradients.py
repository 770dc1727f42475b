"""Compares how a network trains in MXNet and as a PyTorch module: which parameters train, and their gradients.

Both sides get the same inputs and the same gradients of the outputs, in training mode but without dropout, and in
float64 if MXNet can compute in it. Gradients are exchanged as files, one for each array.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from gluon_mgpu.convert.exported import Exported, as_arrays, as_float64, last_line
from gluon_mgpu.convert.graph import Entry, GraphNode, in_float64

EXAMPLES = 3  # batch normalization of 2 examples has nearly no gradient
LARGEST = 2**26  # parameters; with more, float64 needs too much memory
SMALLEST_IMAGE = 64
LARGE = 2**16  # numbers
# The largest relative error in float32: a unit of relu whose input is near 0 may be on its other side
TOLERANCE = {"float64": 1e-4, "float32": 0.05}
FLOOR = {"float64": 1e-6, "float32": 1e-2}  # a smaller gradient, relative to all, may be rounding


class Differences(NamedTuple):
    """words: what differs, a phrase for each parameter. tolerable: whether a larger tolerance accepts it. uncompared:
    what was not compared, and why, or ""."""

    words: list[str]
    tolerable: bool
    uncompared: str


def write_reference(network: Exported, base: str, dtypes: Sequence[str] = ("float64", "float32")) -> None:
    """Compute the gradients with MXNet, in the first of these types in which it can, and write what PyTorch needs into
    the folder BASE.gradients: inputs.npz, with the gradients of the outputs, and mxnet.json.

    If it can in no type, outputs without a gradient, such as indices, are left out: in the type that leaves out fewer.
    """
    network, inputs, folder = _without_noise(network), _inputs(network), Path(f"{base}.gradients")
    training = all(X.shape[network.batch_axes.get(name, 0)] > 1 for name, X in zip(network.inputs, inputs) if X.ndim)
    if sum(array.size for array in network.params.values()) > LARGEST or any(map(_is_deep, network.graph.nodes)):
        dtypes = dtypes[-1:]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings: dict[str, Any] = {"training": training}
    outputs = [*range(len(network.graph.heads))]
    try:
        for dtype in dtypes:
            gradients = None  # which may be large
            gradients = _Gradients(network, inputs, dtype, training)
            if not (reason := gradients.compute(outputs)):
                break
        else:
            assert reason
            parts = {dtype: _Gradients(network, inputs, dtype, training).differentiable() for dtype in dtypes}
            dtype = max(dtypes, key=lambda dtype: len(parts[dtype]))
            gradients, outputs = _Gradients(network, inputs, dtype, training), parts[dtype]
            if not outputs or gradients.compute(outputs):
                raise reason
            settings["reason"] = last_line(reason)
        gradients.save(folder, outputs)
        # In float64, MXNet computes BilinearResize2D as precisely as in float32
        is_rounded = any(node.op == "_contrib_BilinearResize2D" for node in network.graph.nodes)
        settings |= {"dtype": dtype, "precision": "float32" if is_rounded else dtype}
        settings |= {"order": gradients.names, "outputs": outputs}
    except Exception as failure:  # MXNet raises several types
        settings["failure"] = last_line(failure)
    (folder / "mxnet.json").write_text(json.dumps(settings), encoding="utf-8")


def failed(base: str) -> bool:
    """Whether MXNet or PyTorch could compute no gradients."""
    return "failure" in _results(Path(f"{base}.gradients"))


def _results(folder: Path) -> dict[str, Any]:
    """What both sides say: see `write_reference` and pytorch_process.py."""
    files = (folder / "mxnet.json", folder / "pytorch.json")
    return dict(pair for file in files if file.exists() for pair in json.loads(file.read_text("utf-8")).items())


def differences(network: Exported, base: str, tolerance: float) -> Differences:
    """What differs in the module that was written, after PyTorch has computed its gradients."""
    from safetensors import safe_open

    folder = Path(f"{base}.gradients")
    found = _results(folder)
    if "failure" in found:
        return Differences([], False, f"gradients were not compared ({found['failure']})")
    with safe_open(f"{base}.safetensors", "np") as file:
        names = file.metadata() or {}
    keys = {key: names.get(key, key) for key in found["trained"]}
    here, there = network.trained, {name.partition("[")[0] for name in keys.values()}
    errors = _errors(folder, found, {**keys, **{f"input {k}": name for k, name in enumerate(network.inputs)}})
    words = [f"MXNet trains {name!r}, PyTorch does not" for name in sorted(here - there) if errors[name]]
    words += [f"PyTorch trains {name!r}, MXNet does not" for name in sorted(there - here)]
    limit = max(tolerance, TOLERANCE[found["precision"]])
    larger = {
        name: error
        for name, error in errors.items()
        if name in {*network.inputs, *here & there} and not error <= limit  # or it is NaN
    }
    tolerable = not words and all(map(math.isfinite, larger.values()))
    words += [f"the gradient of {name!r} differs by {error:.2g} (relative)" for name, error in larger.items()]
    left_out = ", ".join(repr(network.outputs[k]) for k in found["differentiable"] if k not in found["outputs"])
    return Differences(
        words, tolerable, f"gradients of {left_out} were not compared ({found['reason']})" if left_out else ""
    )


def _errors(folder: Path, found: dict[str, Any], keys: dict[str, str]) -> dict[str, float]:
    """The relative error of each gradient of MXNet's. keys: for each of PyTorch's gradients, MXNet's array, or a part
    of one, such as rnn_parameters[0:64]."""
    parts: dict[str, list[tuple[int, Path]]] = {}
    for key, name in keys.items():
        name, _, place = name.partition("[")
        parts.setdefault(name, []).append((int(place.partition(":")[0] or 0), folder / f"{key}.npy"))
    measured = {
        name: _measured(folder / f"mxnet {k}.npy", parts.get(name, [])) for k, name in enumerate(found["order"])
    }
    total, count = sum(one.norm**2 for one in measured.values()), sum(one.size for one in measured.values())
    floor = FLOOR[found["precision"]] * math.sqrt(total / max(count, 1))
    return {
        name: one.difference / max(one.norm + floor * math.sqrt(one.size), 1e-300) for name, one in measured.items()
    }


class _Measured(NamedTuple):
    difference: float
    norm: float  # the larger one of both sides
    size: int


def _measured(file: Path, parts: list[tuple[int, Path]]) -> _Measured:
    """Compare MXNet's gradient with PyTorch's, whose parts are in files. A part without a file is zero."""
    expected = np.load(file).ravel()
    gradient = np.zeros_like(expected)
    for start, part in parts:
        if part.exists():
            array = np.load(part).ravel()
            gradient[start : start + array.size] += array
    outside = ~(np.isfinite(gradient) | np.isfinite(expected))  # they are not finite on either side
    gradient[outside] = expected[outside] = 0
    norms = [float(np.linalg.norm(array)) for array in (expected, gradient)]
    return _Measured(float(np.linalg.norm(gradient - expected)), max(norms), expected.size)


def _is_deep(node: GraphNode) -> bool:
    """Whether a node has several recurrent layers. MXNet 1.9.1's float64 gradients of these were seen to be wrong."""
    return node.op == "RNN" and node.value("num_layers") > 1


def _without_noise(network: Exported) -> Exported:
    """The network without dropout, and with the mean slope of random slopes.

    PReLU becomes several steps, because MXNet 1.9.1 often multiplies its gradient by the slope. SELU becomes an ELU,
    because its gradient is wrong below 0.
    """
    shapes = network.shapes(X.shape for X in network.samples[0].inputs)

    def rule(i: int, node: GraphNode, add: Callable[[GraphNode], Entry]) -> None:
        kind, name, given = node.attrs.get("act_type"), node.name, node.inputs[:1]
        if node.op == "LeakyReLU" and kind == "prelu":
            positive = add(GraphNode("relu", f"{name} positive", {}, given))
            negative = add(GraphNode("negative", f"{name} minus", {}, given))
            negative = add(GraphNode("relu", f"{name} negative", {}, [negative]))
            shape = (1, -1, *[1] * (len(shapes[i][0]) - 2))
            slopes = add(GraphNode("Reshape", f"{name} slopes", {"shape": str(shape)}, node.inputs[1:]))
            scaled = add(GraphNode("broadcast_mul", f"{name} scaled", {}, [negative, slopes]))
            add(GraphNode("elemwise_sub", name, {}, [positive, scaled]))
        elif node.op == "LeakyReLU" and kind == "rrelu":
            slope = (node.value("lower_bound") + node.value("upper_bound")) / 2
            add(GraphNode("LeakyReLU", name, {"act_type": "leaky", "slope": repr(slope)}, given))
        elif node.op == "LeakyReLU" and kind == "selu":
            y = add(GraphNode("LeakyReLU", f"{name} elu", {"act_type": "elu", "slope": "1.6732632423543772"}, given))
            add(GraphNode("_mul_scalar", name, {"scalar": "1.0507009873554805"}, [y]))
        elif node.op in ("Dropout", "RNN"):
            add(replace(node, attrs={**node.attrs, "p": "0"}))

    return replace(network, graph=network.graph.rewritten(rule))


def _inputs(network: Exported) -> list[np.ndarray]:
    """A few of the second sample's examples: smaller images or shorter sequences if the network accepts other sizes."""
    samples = network.samples
    inputs = [*samples[min(1, len(samples) - 1)].inputs]
    axes = [network.batch_axes.get(name, 0) for name in network.inputs]
    inputs = [X[(slice(None),) * axis + (slice(EXAMPLES),)] if X.ndim else X for X, axis in zip(inputs, axes)]
    sizes = {
        X.shape[axis]
        for k, X in enumerate(inputs)
        for axis in range(X.ndim)
        if len({sample.inputs[k].shape[axis] for sample in samples}) > 1 and axis != axes[k]
    }
    smaller = {size: size % 32 + SMALLEST_IMAGE for size in sizes if size > 2 * SMALLEST_IMAGE}
    fewer = [
        X[tuple(slice(smaller.get(size) if axis != batch else None) for axis, size in enumerate(X.shape))]
        for X, batch in zip(inputs, axes)
    ]
    try:
        network.shapes(X.shape for X in fewer)
        return fewer
    except (mx.MXNetError, ValueError):
        return inputs


class _Gradients:
    """MXNet's gradients of the parameters that train, and of the inputs."""

    def __init__(self, network: Exported, inputs: list[np.ndarray], dtype: str, training: bool) -> None:
        convert = as_float64 if dtype == "float64" else np.asarray
        if dtype == "float64":
            network = replace(network, graph=network.graph.rewritten(in_float64))
        self.network, self.inputs, self.training = network, [convert(X) for X in inputs], training
        self.outputs = [*network.symbol]
        random, sizes = np.random.default_rng(0), network.shapes(X.shape for X in inputs)
        self.heads = [random.standard_normal(sizes[i][output]).astype(dtype) for i, output in network.graph.heads]
        varying = [name for name, X in zip(network.inputs, inputs) if (X % 1).any()]
        self.names = [*sorted(network.trained), *varying]
        # In training, MXNet does not change the order of a weight's numbers, so large weights need not be copied if
        # they are C-contiguous. from_numpy makes its argument read-only: here a view, not the caller's array
        is_shared = training and dtype == "float32"
        shared = {name for name in network.trained if is_shared and network.params[name].size > LARGE}
        with network.np_shape():
            self.values = {
                name: nd.from_numpy(np.ascontiguousarray(array).view())
                if name in shared
                else as_arrays([convert(array)])[0]
                for name, array in network.params.items()
            }
            self.values |= zip(network.inputs, as_arrays(self.inputs))

    def compute(self, outputs: list[int]) -> Exception | None:
        """Compute the gradients of these outputs. Returns the failure if there are none."""
        symbol = mx.sym.Group([mx.sym.identity(self.outputs[k]) for k in outputs])  # one may be a parameter
        try:
            with self.network.np_shape():
                for name in self.names:
                    self.values[name].attach_grad()  # zero, also if these outputs do not depend on it
                with autograd.record(train_mode=self.training):
                    results = nd.CachedOp(symbol)(*(self.values[name] for name in symbol.list_inputs()))
                heads = as_arrays(self.heads[k] for k in outputs)
                autograd.backward(results, heads, train_mode=self.training)
                nd.waitall()
        except Exception as failure:  # MXNet raises several types
            return failure
        return None

    def differentiable(self) -> list[int]:
        """The outputs that have gradients."""
        return [k for k in range(len(self.outputs)) if not self.compute([k])]

    def save(self, folder: Path, outputs: list[int]) -> None:
        for k, name in enumerate(self.names):
            np.save(folder / f"mxnet {k}.npy", self.values[name].grad.asnumpy())
        arrays = {f"input {k}": X for k, X in enumerate(self.inputs)} | {f"head {k}": self.heads[k] for k in outputs}
        np.savez(folder / "inputs.npz", **arrays)
