"""A network to convert: its graph, its parameters, and inputs with the outputs that a conversion must reproduce.

Nodes of the graph are identified by their index, because several can have the same name: a block that is called twice
writes two nodes with its name.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray
from mxnet.util import np_shape

from gluon_mgpu import evaluate
from gluon_mgpu.data.batches import batches
from gluon_mgpu.runtime.errors import Error, UsageError

MOST_TEST_IMAGES = 1000
BATCH_SIZE = 100  # of test images
RANDOM_BATCHES = (1, 4, 2)  # sizes of the batches of random inputs; if possible, the last one has larger images
TRUE = ("True", "true", "1")  # how the graph file represents true
FLOATS = ("float16", "float32", "float64")
# Training layers, whose second input is the labels, and what each layer computes from its first input
LOSSES: dict[str, tuple[str, dict[str, str]]] = {
    "SoftmaxOutput": ("SoftmaxActivation", {"mode": "instance"}),
    "LogisticRegressionOutput": ("sigmoid", {}),
    **dict.fromkeys(("LinearRegressionOutput", "MAERegressionOutput", "SVMOutput"), ("_copy", {})),
}

Shape = tuple[int, ...]
Graph = dict[str, Any]  # the contents of a graph file


class Sample(NamedTuple):
    """Float32 inputs of a network, and the outputs that MXNet computes from them."""

    inputs: tuple[np.ndarray, ...]
    outputs: list[np.ndarray]


@dataclass
class Network:
    """A network that maps one or more inputs to one or more outputs."""

    graph: Graph
    params: dict[str, NDArray]  # float32 or integers; running statistics are included
    inputs: list[str]  # names of the inputs
    samples: list[Sample]  # with different batch sizes, and different image sizes if the network accepts them

    @property
    def symbol(self) -> mx.sym.Symbol:
        return mx.sym.load_json(json.dumps(self.graph))

    def np_shape(self) -> Any:
        """A context in which a shape of () means a scalar, if the network was exported under npx.set_np()."""
        return np_shape(bool(self.graph["attrs"].get("is_np_shape", ["int", 0])[1]))

    def predict(self, inputs: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Compute the outputs with MXNet."""
        return self.evaluate(self.symbol, dict(zip(self.inputs, map(nd.array, inputs))))

    def evaluate(self, symbol: mx.sym.Symbol, values: dict[str, NDArray]) -> list[np.ndarray]:
        """Compute part of the graph with MXNet. values: the inputs that are not parameters."""
        with self.np_shape():
            outputs = nd.CachedOp(symbol)(*({**self.params, **values}[name] for name in symbol.list_inputs()))
            return [output.asnumpy() for output in (outputs if isinstance(outputs, list) else [outputs])]

    def shapes(self, inputs: Iterable[Shape]) -> list[list[Shape]]:
        """Infer the shapes of each node's outputs from the inputs' shapes. Raises ValueError or MXNetError."""
        known = {**{name: array.shape for name, array in self.params.items()}, **dict(zip(self.inputs, inputs))}
        nodes = [{**node, "name": f"{i}_{node['name']}"} for i, node in enumerate(self.graph["nodes"])]
        symbol = mx.sym.load_json(json.dumps({**self.graph, "nodes": nodes})).get_internals()
        names = {nodes[i]["name"]: node["name"] for i, node in enumerate(self.graph["nodes"]) if node["op"] == "null"}
        with self.np_shape(), contextlib.redirect_stdout(io.StringIO()):  # MXNet prints the arguments if it fails
            _, shapes, _ = symbol.infer_shape(**{i: known[name] for i, name in names.items() if name in known})
        if shapes is None:
            raise ValueError("the shapes inside the network cannot be inferred")
        result: list[list[Shape]] = [[] for _ in nodes]
        for name, shape in zip(symbol.list_outputs(), shapes):  # name: such as 12_dense0_fwd_output
            result[int(name.split("_")[0])].append(shape)
        for node, [shape, *_] in zip(self.graph["nodes"], result):
            if "reshape" in node["op"].lower() and math.prod(shape) != math.prod(result[node["inputs"][0][0]][0]):
                raise ValueError(f"{node['op']} layer {node['name']!r} has a fixed shape")  # MXNet would crash
        return result

    def free_axes(self) -> dict[str, dict[int, str]]:
        """For each input: the axes that can have different sizes, with a name for the size, such as n, h and w."""
        found = {}
        for name, arrays in zip(self.inputs, zip(*(sample.inputs for sample in self.samples))):
            names = "nchw" if arrays[0].ndim == 4 else ("n", *(f"size{axis}" for axis in range(1, arrays[0].ndim)))
            sizes = zip(*(X.shape for X in arrays))
            found[name] = {axis: names[axis] for axis, values in enumerate(sizes) if len(set(values)) > 1}
        return found

    def of_one_size(self) -> Network:
        """The same network, but only with those samples that differ from the first in nothing but their batch size."""
        sizes = [[X.shape[1:] for X in sample.inputs] for sample in self.samples]
        return replace(self, samples=[sample for sample, size in zip(self.samples, sizes) if size == sizes[0]])

    def relative_error(self, found: list[list[np.ndarray]]) -> float:
        """The largest |found - expected| / |expected| of any image, where |x| is the Euclidean norm.

        found: the outputs for each sample. Raises Error if their shapes are wrong.
        """
        errors = [0.0]
        for sample, outputs in zip(self.samples, found):
            for expected, output in zip(sample.outputs, outputs):
                if output.shape != expected.shape:
                    raise Error(f"scores have shape {output.shape} instead of {expected.shape}; nothing was written")
                rows = np.atleast_1d(expected).astype(np.float64)
                rows = rows.reshape(len(rows), -1)
                difference = np.linalg.norm(output.reshape(rows.shape) - rows, axis=1)
                errors.append(np.max(difference / np.maximum(np.linalg.norm(rows, axis=1), np.finfo(np.float32).tiny)))
        return float(np.max(errors))  # NaN if one of them is


def refuse(op: str, name: str, why: str = "") -> UsageError:
    """The error for an operator that cannot be converted. repr keeps line breaks in names out of the message."""
    return UsageError(None, f"{op!r} layer {name!r}", f"cannot be converted to PyTorch{why and ': '}{why}")


def from_run(folder: str | Path, impl: str | None = None, data_dir: str | Path | None = None) -> Network:
    """Load a run's network, with test images and the scores that impl computes (None: the run's own lesson).

    impl: "scratch", "highlevel" or a lesson file. Raises UsageError if the network is not a HybridBlock. Other
    exceptions: see `evaluate.load` and `evaluate.held_out`.
    """
    trained = evaluate.load(folder, impl, device="cpu")
    images = evaluate.held_out(trained.run, data_dir)[0][:MOST_TEST_IMAGES]
    with tempfile.TemporaryDirectory() as temporary:
        trained.model.export(f"{temporary}/net")
        network = _read(f"{temporary}/net-symbol.json", f"{temporary}/net-0000.params")
    starts = range(1, len(images), BATCH_SIZE)  # the first batch is a single image
    inputs = [X.asnumpy() for X, _ in batches(images, np.zeros(len(images)), len(images))]
    outputs = np.split(evaluate.scores(trained, images), starts)
    network.samples = [Sample((X,), [scores]) for X, scores in zip(np.split(inputs[0], starts), outputs)]
    return network


def from_files(symbol_file: str | Path, params_file: str | Path, *shapes: Shape) -> Network:
    """Load a network that HybridBlock.export or Module.save_checkpoint wrote, and draw random inputs.

    shapes: the shape of each input without its first axis, which is the batch, such as (3, 224, 224). Inputs are
    numbers in [0, 1), or random word indices if an Embedding layer uses them. Labels are not inputs: a network that
    ends with SoftmaxOutput is converted to one that ends with softmax. Floating-point numbers become float32.
    Raises UsageError if the files do not contain such a network, or if it does not accept these shapes.
    """
    network = _read(symbol_file, params_file)
    given = ";".join(",".join(map(str, shape)) for shape in shapes)
    if len(network.inputs) != len(shapes):
        names = ", ".join(map(repr, network.inputs[:5])) + ", ..." * (len(network.inputs) > 5)
        advice = f"give one shape for each array of the graph that is not in {params_file}: {names}"
        raise UsageError("input", given or None, advice)
    try:
        words, random = _words(network.graph), np.random.default_rng(0)
        for n, grown in zip(RANDOM_BATCHES, (False, False, True)):
            sizes = _grown(network, n, shapes) if grown else [(n, *shape) for shape in shapes]
            inputs = [random.random(size, np.float32) for size in sizes]
            inputs = [np.floor(X * words[name]) if name in words else X for name, X in zip(network.inputs, inputs)]
            network.shapes(sizes)
            network.samples.append(Sample(tuple(inputs), network.predict(inputs)))
    except (mx.MXNetError, ValueError) as error:
        advice = f"{symbol_file} does not accept a batch of {n} inputs of this shape ({last_line(error)})"
        raise UsageError("input", given, advice) from None
    return network


def _read(symbol_file: str | Path, params_file: str | Path) -> Network:
    """Load a network without samples."""
    for file in (symbol_file, params_file):
        if not Path(file).is_file():
            raise UsageError(None, file, "does not exist")
    try:
        graph = _without_losses(json.loads(mx.sym.load(str(symbol_file)).tojson()))
        attrs = json.loads(Path(symbol_file).read_text(encoding="utf-8")).get("attrs", {})
        graph["attrs"].update(is_np_shape=attrs.get("is_np_shape", ["int", 0]))
    except (mx.MXNetError, ValueError) as error:
        raise UsageError(None, symbol_file, f"not the graph of a network ({last_line(error)})") from None
    network = Network(graph, {}, [], [])
    try:
        with network.np_shape():
            arrays = nd.load(str(params_file))
    except Exception as error:  # MXNet raises many exception types for damaged files
        raise UsageError(None, params_file, f"not a file of parameters ({last_line(error)})") from None
    if arrays and not isinstance(arrays, dict):
        raise UsageError(None, params_file, "its arrays have no names; save them with HybridBlock.export")
    nodes, params = graph["nodes"], network.params
    for name, array in dict(arrays).items():
        is_float = np.dtype(array.dtype).name in FLOATS
        params[name.removeprefix("arg:").removeprefix("aux:")] = array.astype("float32") if is_float else array
    for node in nodes:
        attrs = node.get("attrs", {})
        attrs.update({key: "float32" for key in ("dtype",) if attrs.get(key) in FLOATS})
        attrs.pop("__dtype__", None)
        if node["op"] == "BatchNorm" and attrs.get("fix_gamma", "True") in TRUE:
            gamma = params.get(nodes[node["inputs"][1][0]]["name"])
            if gamma is not None:
                gamma[:] = 1  # MXNet ignores the file's value
    inputs = {node["name"] for node in nodes if node["op"] == "null" and node["name"] not in params}
    network.inputs = sorted(inputs, key=lambda name: (len(name), name))  # data0, data1, ..., data10
    return network


def _without_losses(graph: Graph) -> Graph:
    """Replace layers that compute losses by what they output, so that labels are no longer inputs."""
    for node in graph["nodes"]:
        if node["op"] in LOSSES:
            attrs = node.get("attrs", {})
            op, new_attrs = LOSSES[node["op"]]
            if attrs.get("preserve_shape") in TRUE:
                op, new_attrs = "softmax", {"axis": "-1"}
            elif attrs.get("multi_output") in TRUE:
                new_attrs = {"mode": "channel"}
            node.update(op=op, attrs=new_attrs, inputs=node["inputs"][:1])
    return json.loads(mx.sym.load_json(json.dumps(graph)).tojson())  # without nodes that are no longer used


def _words(graph: Graph) -> dict[str, int]:
    """For each input that Embedding layers use as word indices: the smallest vocabulary size of these layers."""
    nodes, found = graph["nodes"], dict[str, int]()
    for node in nodes:
        if node["op"] == "Embedding":
            pending = [node["inputs"][0][0]]
            while pending:
                source = nodes[pending.pop()]
                pending += [i for i, *_ in source["inputs"]]
                if source["op"] == "null":
                    count = int(node["attrs"]["input_dim"])
                    found[source["name"]] = min(count, found.get(source["name"], count))
    return found


def _grown(network: Network, n: int, shapes: tuple[Shape, ...]) -> list[Shape]:
    """Shapes of a batch of n inputs, with larger images or longer sequences if the network accepts them."""

    def grow(axes: Iterable[int]) -> list[Shape]:
        by = {axis: 32 * max(axis - 1, 1) for axis in axes}
        return [(n, *(size + by.get(axis, 0) for axis, size in enumerate(shape, 1))) for shape in shapes]

    def accepted(axes: Iterable[int]) -> bool:
        try:
            return bool(network.shapes(grow(axes)))
        except (mx.MXNetError, ValueError):
            return False

    axes = [axis for axis in range(1, max(map(len, shapes), default=0) + 1) if accepted([axis])]
    return grow(axes if accepted(axes) else [])


def last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
