"""Compares how a network trains in MXNet and as a PyTorch module: which parameters train, and their gradients.

Both sides get the same inputs and the same gradients of the outputs, in training mode but without dropout, and in
float64 if MXNet can compute in it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

from gluon_mgpu.convert.exported import Exported, as_arrays, as_float64, last_line

EXAMPLES = 3  # batch normalization of 2 examples has nearly no gradient
LARGEST = 2**26  # parameters; with more, float64 needs too much memory
SMALLEST_IMAGE = 64
# The largest relative error in float32: a unit of relu whose input is near 0 may be on its other side
TOLERANCE = {"float64": 1e-4, "float32": 0.05}


class Differences(NamedTuple):
    """words: what differs, a phrase for each parameter. tolerable: whether a larger tolerance accepts it. uncompared:
    what was not compared, and why, or ""."""

    words: list[str]
    tolerable: bool
    uncompared: str


def write_reference(network: Exported, base: str, dtypes: Sequence[str] = ("float64", "float32")) -> None:
    """Compute the gradients with MXNet, in the first of these types in which it can, and write what COMPARE needs into
    the folder BASE.gradients: inputs and gradients of outputs, and 0.npy, 1.npy, ... for the parameters and inputs in
    the order of index.json.

    If it can in no type, outputs without a gradient, such as indices, are left out: in the type that leaves out fewer.
    """
    network, inputs = _without_noise(network), _inputs(network)
    training = all(X.shape[network.batch_axes.get(name, 0)] > 1 for name, X in zip(network.inputs, inputs) if X.ndim)
    if sum(array.size for array in network.params.values()) > LARGEST or any(map(_is_deep, network.graph["nodes"])):
        dtypes = dtypes[-1:]
    os.makedirs(f"{base}.gradients", exist_ok=True)
    index: dict[str, Any] = {"training": training, "inputs": network.inputs}
    outputs = [*range(len(network.graph["heads"]))]
    try:
        for dtype in dtypes:
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
            index["reason"] = last_line(reason)
        gradients.save(f"{base}.gradients", outputs)
        index |= {"dtype": dtype, "order": gradients.names}
    except Exception as failure:  # MXNet raises several types
        index["failure"] = last_line(failure)
    Path(f"{base}.gradients", "index.json").write_text(json.dumps(index), encoding="utf-8")


def failed(base: str) -> bool:
    """Whether MXNet or PyTorch could compute no gradients."""
    return "failure" in json.loads(Path(f"{base}.gradients", "index.json").read_text(encoding="utf-8"))


def differences(network: Exported, base: str, tolerance: float) -> Differences:
    """What differs in the module that was written, after COMPARE has run."""
    found = json.loads(Path(f"{base}.gradients", "index.json").read_text(encoding="utf-8"))
    if "failure" in found:
        return Differences([], False, f"gradients were not compared ({found['failure']})")
    here, there, errors = trained(network), {*found["trained"]}, found["errors"]
    words = [f"MXNet trains {name!r}, PyTorch does not" for name in sorted(here - there) if errors[name]]
    words += [f"PyTorch trains {name!r}, MXNet does not" for name in sorted(there - here)]
    limit = max(tolerance, TOLERANCE[found["dtype"]])
    larger = {
        name: error
        for name, error in errors.items()
        if name in {*network.inputs, *here & there} and not error <= limit  # or it is NaN
    }
    tolerable = not words and all(map(math.isfinite, larger.values()))
    words += [f"the gradient of {name!r} differs by {error:.2g} (relative)" for name, error in larger.items()]
    names = ", ".join(repr(network.outputs[k]) for k in found["uncompared"])
    return Differences(words, tolerable, f"gradients of {names} were not compared ({found['reason']})" if names else "")


# Compares the gradients of `net` with those of `write_reference`
COMPARE = r'''
import json
from safetensors import safe_open
from torch.nn import functional as F


def compare(folder, reference):
    """For each parameter, the relative error of its gradient; and those that train."""
    dtype = getattr(torch, reference["dtype"])
    if dtype == torch.float64:  # the module's float32 stands for any type
        torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
        torch.set_default_dtype(dtype)
    net.to(dtype).train(reference["training"])
    F.dropout, F.rrelu = lambda x, *_, **__: x, lambda x, low, high, *_: F.leaky_relu(x, (low + high) / 2)
    for module in net.modules():
        if isinstance(module, torch.nn.RNNBase):
            module.dropout = 0.0
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with np.load(folder + "/inputs.npz") as arrays:
        inputs = [torch.from_numpy(arrays[f"inputs {k}"]) for k in range(len(reference["inputs"]))]
        heads = {int(name.split()[1]): torch.from_numpy(arrays[name]) for name in arrays if name.startswith("heads")}
    for x in inputs:
        x.requires_grad_(x.is_floating_point())
    outputs = net(*inputs)
    outputs = {k: y for k, y in enumerate(outputs if isinstance(outputs, tuple) else [outputs]) if y.requires_grad}
    if pairs := [(y, heads[k]) for k, y in outputs.items() if k in heads]:
        torch.autograd.backward(*zip(*pairs))
    variables = {key: array for key, array in net.named_parameters(remove_duplicate=False) if array.requires_grad}
    with safe_open(base + ".safetensors", "np") as file:
        names = {key: name for key, name in (file.metadata() or {}).items() if key in variables}
    parts = {name: [(0, x)] for name, x in zip(reference["inputs"], inputs)}
    for key, name in names.items():  # name[start:end] is a part of an array
        name, _, place = name.partition("[")
        parts.setdefault(name, []).append((int(place.partition(":")[0] or 0), variables[key]))
    known = {id(variables[key]) for key in names}
    unnamed = [key for key, array in variables.items() if id(array) not in known]
    found, floor = {}, 1e-6 if dtype == torch.float64 else 1e-2
    for k, name in enumerate(reference["order"]):
        expected = np.load(f"{folder}/{k}.npy", mmap_mode="r").ravel()
        gradient = np.zeros(expected.shape)
        for start, array in parts.get(name, []):
            if array.grad is not None:
                gradient[start : start + array.numel()] += array.grad.numpy().ravel()
        both = np.isfinite(gradient) | np.isfinite(expected)  # the others are not finite on either side
        difference, norm = np.linalg.norm((gradient - expected)[both]), np.linalg.norm(expected[both])
        found[name] = difference, max(norm, np.linalg.norm(gradient[both])), expected.size
    floor *= (sum(norm**2 for _, norm, _ in found.values()) / max(sum(size for *_, size in found.values()), 1)) ** 0.5
    errors = {
        name: float(difference / max(norm + floor * size**0.5, 1e-300))
        for name, (difference, norm, size) in found.items()
    }
    there = [name.partition("[")[0] for name in names.values()] + unnamed
    return {"trained": there, "errors": errors, "uncompared": [k for k in outputs if k not in heads]}


folder = base + ".gradients"
with open(folder + "/index.json") as file:
    reference = json.load(file)
if "failure" not in reference:
    try:
        reference |= compare(folder, reference)
    except Exception as error:
        reference["failure"] = str(error).strip().partition("\n")[0]
    with open(folder + "/index.json", "w") as file:
        json.dump(reference, file)
'''


def trained(network: Exported) -> set[str]:
    """The parameters that MXNet trains."""
    return {*network.symbol.list_arguments()} & network.params.keys() - network.constants - network.frozen


def _is_deep(node: dict[str, Any]) -> bool:
    """Whether a node has several recurrent layers. MXNet 1.9.1's float64 gradients of these were seen to be wrong."""
    return node["op"] == "RNN" and int(node.get("attrs", {}).get("num_layers", "1")) > 1


def _without_noise(network: Exported) -> Exported:
    """The network without dropout, and with the mean slope of random slopes.

    PReLU becomes several steps, because after some layers, MXNet 1.9.1 multiplies its gradient by the slope.
    """
    nodes, moved = list[dict[str, Any]](), list[int]()

    def add(op: str, inputs: list[list[int]], name: str, **attrs: str) -> list[int]:
        nodes.append({"op": op, "name": name, "attrs": attrs, "inputs": inputs})
        return [len(nodes) - 1, 0, 0]

    shapes = network.shapes(X.shape for X in network.samples[0].inputs)
    for node in network.graph["nodes"]:
        inputs, attrs = [[moved[i], *rest] for i, *rest in node["inputs"]], node.get("attrs", {})
        kind, name = attrs.get("act_type"), node["name"]
        if node["op"] == "LeakyReLU" and kind == "prelu":
            positive = add("relu", inputs[:1], f"{name} positive")
            negative = add("relu", [add("negative", inputs[:1], f"{name} minus")], f"{name} negative")
            source, output, *_ = node["inputs"][0]
            shape = (1, -1, *[1] * (len(shapes[source][output]) - 2))
            slopes = add("Reshape", inputs[1:], f"{name} slopes", shape=str(shape))
            scaled = add("broadcast_mul", [negative, slopes], f"{name} scaled")
            add("elemwise_sub", [positive, scaled], name)
        elif node["op"] == "LeakyReLU" and kind == "rrelu":
            slope = (float(attrs.get("lower_bound", 0.125)) + float(attrs.get("upper_bound", 0.334))) / 2
            add("LeakyReLU", inputs, name, act_type="leaky", slope=repr(slope))
        elif node["op"] in ("Dropout", "RNN"):
            nodes.append({**node, "attrs": {**attrs, "p": "0"}, "inputs": inputs})
        else:
            nodes.append({**node, "inputs": inputs})
        moved.append(len(nodes) - 1)
    graph = {**network.graph, "nodes": nodes, "arg_nodes": [k for k, node in enumerate(nodes) if node["op"] == "null"]}
    return replace(network, graph={**graph, "heads": [[moved[i], *rest] for i, *rest in network.graph["heads"]]})


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
            network = replace(network, graph=network.graph_in_float64())
        self.network, self.inputs, self.training = network, [convert(X) for X in inputs], training
        self.outputs = [*network.symbol]
        random, sizes = np.random.default_rng(0), network.shapes(X.shape for X in inputs)
        places = [(i, output) for i, output, *_ in network.graph["heads"]]
        self.heads = [random.standard_normal(sizes[i][output]).astype(dtype) for i, output in places]
        varying = [name for name, X in zip(network.inputs, inputs) if (X % 1).any()]
        self.names = [*sorted(trained(network)), *varying]
        with network.np_shape():
            self.values = {name: as_arrays([convert(array)])[0] for name, array in network.params.items()}
            self.values |= zip(network.inputs, as_arrays(self.inputs))

    def compute(self, outputs: list[int]) -> Exception | None:
        """Compute the gradients of these outputs. Returns the failure if there are none."""
        symbol = mx.sym.Group([self.outputs[k] for k in outputs])
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

    def save(self, folder: str, outputs: list[int]) -> None:
        for k, name in enumerate(self.names):
            np.save(f"{folder}/{k}.npy", self.values[name].grad.asnumpy())
        arrays = {f"inputs {k}": X for k, X in enumerate(self.inputs)} | {f"heads {k}": self.heads[k] for k in outputs}
        np.savez(f"{folder}/inputs.npz", **arrays)
