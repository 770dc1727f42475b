"""A network to convert: its graph, its parameters, and inputs with the outputs that a conversion must reproduce."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Union

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray
from mxnet.util import np_shape

from gluon_mgpu import evaluate
from gluon_mgpu.convert.graph import Graph, in_float64, read, without_losses
from gluon_mgpu.convert.registry import attributes
from gluon_mgpu.data.batches import batches
from gluon_mgpu.support.errors import Error, UsageError

MOST_TEST_IMAGES = 1000
BATCH_SIZE = 100  # of test images
RANDOM_BATCHES = (1, 3, 2)  # sizes of the batches of random inputs; if possible, the last one has larger images
LARGER_BATCHES = (*range(2, 33), 64, 100, 128, 256)  # batch sizes for which a graph may be written
FLOATS = ("float16", "float32", "float64")
# For operators with indices or lengths: {position of this input: the attribute with the number of indices, "size" for
# the size of an axis of the first input, "length", or "all" for the length of the longest sequence}. Operators have
# their simple names.
INDICES: dict[str, dict[int, str]] = {
    "embedding": {0: "input_dim"},
    "onehot": {0: "depth"},
    **dict.fromkeys(("take", "pick", "gathernd"), {1: "size"}),
    **dict.fromkeys(("sequencemask", "sequencelast", "sequencereverse", "softmax"), {1: "length"}),
}
# Operators whose output contains numbers of their first input
MOVES = """reshape transpose swapaxis expanddims squeeze slice sliceaxis slicelike slicechannel split splitv2 concat
    concatenate stack flatten cast ampcast copy blockgrad tile repeat reverse flip clip to axis like""".split()

Shape = tuple[int, ...]
Given = tuple[Union[int, str], ...]  # a shape whose batch is written as "n"


class Sample(NamedTuple):
    """Inputs of a network, and the outputs that MXNet computes from them."""

    inputs: tuple[np.ndarray, ...]
    outputs: list[np.ndarray]  # empty until Exported.compute


@dataclass
class Exported:
    """A network that maps one or more inputs to one or more outputs."""

    graph: Graph
    params: dict[str, np.ndarray]  # float32 or integers; running statistics are included
    inputs: list[str]  # names of the inputs
    samples: list[Sample]  # with different batch sizes, and different image sizes if the network accepts them
    batch_axes: dict[str, int] = field(default_factory=dict)  # of inputs whose batch is not the first axis

    @property
    def symbol(self) -> mx.sym.Symbol:
        return self.graph.symbol()

    @property
    def outputs(self) -> list[str]:
        """Different names for the outputs."""
        names = list[str]()
        for name in self.symbol.list_outputs():
            names.append(f"{name}{len(names)}" if name in {*names, *self.inputs} else name)
        return names

    def np_shape(self) -> Any:
        """A context in which a shape of () means a scalar, if the network was exported under npx.set_np()."""
        return np_shape(self.graph.is_np_shape)

    @functools.cached_property
    def constants(self) -> set[str]:
        """The parameters that are no variables of the training: Gluon's constants, and integers."""
        constants = {node.name for node in self.graph.nodes if node.attrs.get("__init__", "").startswith("Constant_")}
        return {name for name, array in self.params.items() if array.dtype != np.float32 or name in constants}

    @functools.cached_property
    def frozen(self) -> set[str]:
        """The parameters that MXNet does not change: their learning rate is 0, or batch normalization ignores them."""
        multipliers = ("lr_mult", "__lr_mult__", "grad_mult", "__grad_mult__")
        found = set[str]()
        for node in self.graph.nodes:
            if node.op == "null" and any(_is_zero(node.attrs.get(key, "1")) for key in multipliers):
                found.add(node.name)
            if node.kind in ("batchnorm", "syncbatchnorm") and node.is_true("fix_gamma", "True"):
                found.add(self.graph.nodes[node.inputs[1][0]].name)
        return found & self.params.keys()

    @functools.cached_property
    def trained(self) -> set[str]:
        """The parameters that MXNet trains."""
        return {*self.symbol.list_arguments()} & self.params.keys() - self.constants - self.frozen

    def predict(self, inputs: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Compute the outputs with MXNet."""
        [outputs] = self.evaluate(self.symbol, [inputs])
        return outputs

    def evaluate(self, symbol: mx.sym.Symbol, samples: Iterable[Iterable[np.ndarray]]) -> list[list[np.ndarray]]:
        """Compute part of the graph with MXNet, for each sample's inputs."""
        names, results = symbol.list_inputs(), list[list[np.ndarray]]()
        with self.np_shape():
            fixed = mx.sym.Group([mx.sym.BlockGrad(output) for output in symbol])  # some operators have no gradient
            operator = nd.CachedOp(fixed)
            needed = self.params.keys() & names
            arrays = dict(zip(needed, as_arrays(self.params[name] for name in needed)))
            for inputs in samples:
                arrays.update(zip(self.inputs, as_arrays(inputs)))
                outputs = operator(*(arrays[name] for name in names))
                outputs = outputs if isinstance(outputs, list) else [outputs]
                results.append([output.asnumpy() for output in outputs])
        return results

    def shapes(self, inputs: Iterable[Shape]) -> list[list[Shape]]:
        """Infer the shapes of each node's outputs from the inputs' shapes. Raises ValueError or MXNetError."""
        known = {**{name: array.shape for name, array in self.params.items()}, **dict(zip(self.inputs, inputs))}
        nodes = [replace(node, name=f"{i}_{node.name}") for i, node in enumerate(self.graph.nodes)]
        symbol = replace(self.graph, nodes=nodes).symbol().get_internals()
        arguments = {f"{i}_{node.name}": node.name for i, node in enumerate(self.graph.nodes) if node.op == "null"}
        with self.np_shape(), contextlib.redirect_stdout(io.StringIO()):  # MXNet prints the arguments if it fails
            _, shapes, _ = symbol.infer_shape(**{i: known[name] for i, name in arguments.items() if name in known})
        if shapes is None:
            raise ValueError("the shapes inside the network cannot be inferred")
        result: list[list[Shape]] = [[] for _ in nodes]
        for name, shape in zip(symbol.list_outputs(), shapes):  # name: such as 12_dense0_fwd_output
            result[int(name.split("_")[0])].append(shape)
        for node, [shape, *_] in zip(self.graph.nodes, result):
            if "reshape" in node.op.lower() and math.prod(shape) != math.prod(result[node.inputs[0][0]][0]):
                raise ValueError(f"{node.op} layer {node.name!r} has a fixed shape")  # MXNet would crash
        return result

    def axes(self, name: str) -> list[int | str]:
        """The sizes of an input's axes. An axis that can have different sizes has a name, such as n, h or w."""
        first, *_ = shapes = [sample.inputs[self.inputs.index(name)].shape for sample in self.samples]
        names = "nchw" if len(first) == 4 else ["n", *(f"size{axis}" for axis in range(1, len(first)))]
        batch = self.batch_axes.get(name, 0)
        names = [*names[1 : batch + 1], "n", *names[batch + 1 :]]
        return [names[k] if len(set(sizes)) > 1 else sizes[0] for k, sizes in enumerate(zip(*shapes))]

    def of_one_size(self) -> Exported:
        """The same network, but only with those samples that differ from the first in nothing but their batch size."""
        axes = [self.batch_axes.get(name, 0) for name in self.inputs]
        sizes = [
            [X.shape[:axis] + X.shape[axis + 1 :] for X, axis in zip(sample.inputs, axes)] for sample in self.samples
        ]
        return replace(self, samples=[sample for sample, size in zip(self.samples, sizes) if size == sizes[0]])

    def compute(self) -> Exported:
        """Compute those outputs of the samples that are missing. Raises MXNetError."""
        missing = [k for k, sample in enumerate(self.samples) if not sample.outputs]
        found = self.evaluate(self.symbol, [self.samples[k].inputs for k in missing]) if missing else []
        for k, outputs in zip(missing, found):
            X = self.samples[k].inputs
            if not all(np.isfinite(Y).all() for Y in outputs):  # from numbers in [0, 1) instead
                X = tuple(np.where(x == np.floor(x), x, x % 1).astype(x.dtype) for x in X)
                outputs = self.predict(X)
            self.samples[k] = Sample(X, outputs)
        release_memory()
        return self

    def relative_error(self, found: list[list[np.ndarray]]) -> float:
        """The largest |found - expected| of any example, where |x| is the Euclidean norm, relative to |expected| or, if
        that is larger, to the root mean square of |expected| over all examples.

        found: the outputs for each sample. Raises Error if their shapes are wrong.
        """
        errors = [0.0]
        for k in range(len(self.samples[0].outputs)):
            differences, norms = list[np.ndarray](), list[np.ndarray]()
            for sample, outputs in zip(self.samples, found):
                expected, output = sample.outputs[k], outputs[k]
                if output.shape != expected.shape:
                    raise Error(f"scores have shape {output.shape} instead of {expected.shape}; nothing was written")
                rows, others = (np.atleast_1d(Y).astype(np.float64) for Y in (expected, output))
                equal = (rows == others) | np.isnan(rows) & np.isnan(others)
                for values, result in ((np.where(equal, 0, others - rows), differences), (rows, norms)):
                    values = np.where(equal & ~np.isfinite(values), 0, values).reshape(len(rows), -1)
                    result.append(np.linalg.norm(values, axis=1))
            norm = np.concatenate(norms)
            typical = max(math.sqrt(np.mean(norm**2)), float(np.finfo(np.float32).tiny))
            errors.append(np.max(np.concatenate(differences) / np.maximum(norm, typical)))
        return float(np.max(errors))  # NaN if one of them is

    def in_float64(self) -> Exported | None:
        """The network and its outputs in float64. None if MXNet cannot compute them, or if its graph does not give the
        expected outputs in float32."""
        arrays = {name: as_float64(array) for name, array in self.params.items()}
        double = replace(self, graph=self.graph.rewritten(in_float64), params=arrays)
        try:
            exact = double.evaluate(double.symbol, [map(as_float64, X) for X, _ in self.samples])
            again = self.evaluate(self.symbol, [X for X, _ in self.samples])
        except mx.MXNetError:  # some operators compute only in float32
            return None
        double.samples = [Sample(X, outputs) for (X, _), outputs in zip(self.samples, exact)]
        return double if self.relative_error(again) < 1e-5 else None

    def before(self, i: int) -> list[str]:
        """The names, as in --output, of the outputs that a node takes, without the network's inputs and parameters."""
        entries = [entry for entry in self.graph.nodes[i].inputs if self.graph.nodes[entry[0]].op != "null"]
        return [self.graph.symbol([entry]).list_outputs()[0].removesuffix("_output") for entry in entries]

    def ties(self) -> list[str]:
        """Describes the layers that order equal numbers, which MXNet and PyTorch do differently."""
        found = []
        for i, node in enumerate(self.graph.nodes):
            if node.op not in ("topk", "argsort") or node.attrs.get("ret_typ") == "value":
                continue
            axis = node.value("axis")
            for [values] in self.evaluate(self.graph.symbol(node.inputs[:1]), [X for X, _ in self.samples]):
                if (np.diff(np.sort(values, axis), axis=-1 if axis is None else axis) == 0).any():
                    names = " ".join(f"--output {name}" for name in self.before(i))
                    found.append(
                        f"{node.op!r} layer {node.name!r} orders equal numbers"
                        + f"; {names} converts the part before it" * bool(names)
                    )
                    break
        return found

    def worst_input(self, found: list[list[np.ndarray]]) -> str:
        """Describes the sample whose outputs differ most."""
        errors = [replace(self, samples=[one]).relative_error([Ys]) for one, Ys in zip(self.samples, found)]
        X = self.samples[int(np.argmax(np.nan_to_num(errors, nan=np.inf)))].inputs[0]
        return f"{self.inputs[0]} of shape {X.shape}, from {X.min():.3g} to {X.max():.3g}"

    @property
    def batch_sizes(self) -> list[int]:
        """The number of examples of each sample."""
        axis = self.batch_axes.get(self.inputs[0], 0)
        return [inputs[0].shape[axis] for inputs, _ in self.samples]

    def batch_axis(self, k: int) -> int:
        """The axis of output k that is the batch. 0 if no axis has the batch's size in all samples."""
        shapes = [outputs[k].shape for _, outputs in self.samples]
        return next((axis for axis, lengths in enumerate(zip(*shapes)) if [*lengths] == self.batch_sizes), 0)

    def nearly_constant(self) -> list[str]:
        """The outputs that hardly depend on the inputs, so that comparing them says little."""
        names = []
        for k, name in enumerate(self.outputs):
            alike, axis = dict[Shape, list[np.ndarray]](), self.batch_axis(k)
            for _, outputs in self.samples:
                if outputs[k].ndim and outputs[k].size:
                    Y = np.moveaxis(outputs[k], axis, 0)
                    alike.setdefault(Y.shape[1:], []).append(Y)
            arrays = [np.concatenate(parts) for parts in alike.values()]
            if not any(np.ptp(Y, axis=0).max() > 1e-3 * np.abs(Y).max() for Y in arrays):
                names.append(name)
        return names


class Unsupported(Exception):
    """An operator that cannot be converted. The message is the reason."""

    def __init__(self, reason: str, fixed_size: bool = False) -> None:
        super().__init__(reason)
        self.fixed_size = fixed_size  # whether it can be converted for inputs of one size


def from_run(folder: str | Path, impl: str | None = None, data_dir: str | Path | None = None) -> Exported:
    """Load a run's network, with test images and the scores that impl computes (None: the run's own lesson).

    impl: "scratch", "highlevel" or a lesson file. Raises UsageError if the network is not a HybridBlock. Other
    exceptions: see `evaluate.load` and `evaluate.held_out`.
    """
    trained = evaluate.load(folder, impl, device="cpu")
    images = evaluate.held_out(trained.run, data_dir)[0][:MOST_TEST_IMAGES]
    images = np.resize(images, (max(len(images), 3), *images.shape[1:]))  # repeated, for batches of 1 and 2
    with tempfile.TemporaryDirectory() as temporary:
        trained.model.export(f"{temporary}/net")
        network = _read(f"{temporary}/net-symbol.json", f"{temporary}/net-0000.params")
    starts = range(1, len(images), BATCH_SIZE)  # the first batch is a single image
    inputs = [X.asnumpy() for X, _ in batches(images, np.zeros(len(images)), len(images))]
    outputs = np.split(evaluate.scores(trained, images), starts)
    network.samples = [Sample((X,), [scores]) for X, scores in zip(np.split(inputs[0], starts), outputs)]
    return network


def from_files(
    symbol_file: str | Path,
    params_file: str | Path,
    *shapes: Given,
    inputs: Mapping[str, Given] | None = None,
    outputs: Iterable[str] = (),
) -> Exported:
    """Load a network that HybridBlock.export or Module.save_checkpoint wrote, and draw random inputs.

    shapes: the shape of each input without the batch, such as (3, 224, 224), in the order data0, data1, ...; or inputs:
    shapes by name. () is one number per example, and "n" marks the batch if it is not the first axis, such as
    (35, "n", 200). outputs: names of outputs or layers that become the outputs instead of those of the graph.

    Inputs are numbers in [0, 1), numbers in [0, 255), and normally distributed numbers, or integers if the network uses
    them as indices or lengths. Labels are not inputs: a network that ends with SoftmaxOutput is converted to one that
    ends with softmax. Floating-point numbers become float32. Raises UsageError if the files do not contain such a
    network, or if it does not accept these shapes.
    """
    network = _read(symbol_file, params_file, list(outputs))
    given = dict(zip(network.inputs, shapes)) if inputs is None else dict(inputs)
    text = "; ".join(f"{name}={','.join(map(str, shape))}" for name, shape in given.items())
    if {*given} != {*network.inputs} or inputs is None and len(shapes) != len(network.inputs):
        names = ", ".join(map(repr, network.inputs[:5])) + ", ..." * (len(network.inputs) > 5)
        advice = f"give one shape for each array of the graph that is not in {params_file}: {names}"
        if "label" in names:
            advice += "; --output NAME leaves out a loss and its labels"
        raise UsageError("input", text or None, advice)
    candidates = [{name: shape.index("n") for name, shape in given.items() if "n" in shape[1:]}]
    if not candidates[0] and any(len(shape) > 1 for shape in given.values()):
        candidates.append({name: 1 for name, shape in given.items() if shape})  # as in a recurrent network
    errors = list[Exception]()
    for counts in (RANDOM_BATCHES, (1, 1, 1)):  # some networks accept only one example
        for axes in candidates:
            network.batch_axes = axes
            try:
                _draw(network, given, counts)
                return network
            except (mx.MXNetError, ValueError) as error:
                errors.append(error)
    for n in LARGER_BATCHES:
        for axes in candidates:
            network.batch_axes = axes
            with contextlib.suppress(mx.MXNetError, ValueError):
                _draw(network, given, (n,))
                advice = f"accepts only a batch of {n}; networks for one batch size above 1 cannot be converted"
                raise UsageError(None, symbol_file, advice)
    advice = f"{symbol_file} does not accept a batch of inputs of this shape ({last_line(errors[0])})"
    if isinstance(errors[0], mx.MXNetError):
        advice += "; if the batch is not the first axis, write n for it, such as 35,n,200"
    raise UsageError("input", text, advice)


def _draw(network: Exported, given: dict[str, Given], counts: Iterable[int]) -> None:
    """Draw the network's samples. Raises ValueError or MXNetError if it does not accept inputs of these shapes."""
    random, network.samples = np.random.default_rng(0), []
    draws: tuple[Callable[[Shape], np.ndarray], ...] = (
        random.random,
        random.standard_normal,
        lambda size: 255 * random.random(size),
    )
    for n, draw in zip(counts, draws):
        sizes = []
        for name in network.inputs:
            fixed = [int(size) for size in given[name] if size != "n"]
            fixed.insert(network.batch_axes.get(name, 0), n)
            sizes.append(tuple(fixed))
        shapes = network.shapes(sizes)
        if draw is draws[-1]:
            sizes = _grown(network, sizes)
            shapes = network.shapes(sizes)
        integers, arrays = _integers(network, shapes), []
        for name, size in zip(network.inputs, sizes):
            low, high, dtype = integers.get(name, (0, 0, "float32"))
            arrays.append((random.integers(low, high, size) if name in integers else draw(size)).astype(dtype))
        network.samples.append(Sample(tuple(arrays), []))


def _read(symbol_file: str | Path, params_file: str | Path, outputs: Sequence[str] = ()) -> Exported:
    """Load a network without samples. outputs: the names of its outputs, or () for those of the file."""
    for file in (symbol_file, params_file):
        if not Path(file).is_file():
            raise UsageError(None, file, "does not exist")
    try:
        graph = read(symbol_file)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = str(error) if type(error) is ValueError else "it is damaged"
        raise UsageError(None, symbol_file, f"not the graph of a network ({why})") from None
    graph = graph.ending_with(outputs)
    try:
        graph = graph.loaded().rewritten(without_losses).loaded()
    except (mx.MXNetError, ValueError) as error:
        advice = f"MXNet cannot load it ({last_line(error)}); --output NAME converts a part"
        raise UsageError(None, symbol_file, advice) from None
    network = Exported(graph, {}, [], [])
    try:
        with network.np_shape():
            arrays = nd.load(str(params_file)) or {}
    except Exception as error:  # MXNet raises several types for damaged files
        raise UsageError(None, params_file, f"not a file of parameters ({last_line(error)})") from None
    if not isinstance(arrays, dict):
        raise UsageError(None, params_file, "its arrays have no names; save them with HybridBlock.export")
    for name in [*arrays]:
        array = arrays.pop(name)  # memory does not hold a second copy of all arrays
        dtype = "float32" if np.dtype(array.dtype).name in FLOATS else array.dtype
        network.params[re.sub("^(arg|aux):", "", name)] = array.asnumpy().astype(dtype, copy=False)
    for node in graph.nodes:
        if node.attrs.get("dtype") in FLOATS:
            node.attrs["dtype"] = "float32"
        node.attrs.pop("__dtype__", None)
        if "batchnorm" in node.kind and node.is_true("fix_gamma", "True"):
            gamma, *others = (graph.nodes[i].name for i, _ in node.inputs[1:])
            if known := [network.params[name] for name in (gamma, *others) if name in network.params]:
                network.params[gamma] = np.ones_like(known[0])  # MXNet ignores the file's value
    inputs = {node.name for node in graph.nodes if node.op == "null"} - network.params.keys()
    network.inputs = sorted(inputs, key=lambda name: (len(name), name))  # data0, data1, ..., data10
    return network


def _integers(network: Exported, shapes: list[list[Shape]]) -> dict[str, tuple[int, int, str]]:
    """For each input that is used as indices or lengths: the smallest number, the largest one plus 1, and the type."""
    nodes, found = network.graph.nodes, dict[str, tuple[int, int, str]]()
    for node in nodes:
        inputs = [shapes[i][output] for i, output in node.inputs]
        positions = INDICES.get(node.kind, {})
        if node.has_lengths:
            positions = {len(inputs) - 1: "all"}
        for position, sizes in positions.items():
            if position >= len(inputs):  # no lengths
                continue
            dtype = "int32" if node.kind == "softmax" else "float32"
            if sizes in node.attrs:
                count = int(node.attrs[sizes])
            else:
                axis = node.value("axis") if "axis" in attributes(node.op) else 0
                count = math.prod(inputs[0]) if axis is None or not inputs[0] else inputs[0][axis]
            low, high = {"length": (1, count + 1), "all": (count, count + 1)}.get(sizes, (0, count))
            source = nodes[node.inputs[position][0]]
            while source.kind in MOVES:
                source = nodes[source.inputs[0][0]]
            name = source.name
            least, other, _ = found.get(name, (0, high, ""))
            found[name] = max(low, least), min(high, other), dtype
    return found


def _grown(network: Exported, shapes: list[Shape]) -> list[Shape]:
    """Larger images or longer sequences, if the network accepts them. shapes: of the inputs, with the batch."""
    alike: dict[tuple[int, int], list[tuple[int, int]]] = {}  # axes that have the same place and size in some inputs
    for k, (name, shape) in enumerate(zip(network.inputs, shapes)):
        free = [axis for axis in range(len(shape)) if axis != network.batch_axes.get(name, 0)]
        for place, axis in list(enumerate(free))[len(shape) > 3 :]:  # the channels stay
            alike.setdefault((place, shape[axis]), []).append((k, axis))
    for (place, size), axes in alike.items():
        larger = [list(shape) for shape in shapes]
        for k, axis in axes:
            larger[k][axis] += min(size, 32) * max(place, 1)
        grown = [tuple(shape) for shape in larger]
        with contextlib.suppress(mx.MXNetError, ValueError):
            network.shapes(grown)
            shapes = grown
    return shapes


def release_memory() -> None:
    """Return memory to the system, which glibc keeps after large arrays are freed."""
    with contextlib.suppress(AttributeError):  # of other libraries
        ctypes.CDLL(None).malloc_trim(0)


def as_arrays(inputs: Iterable[np.ndarray]) -> list[NDArray]:
    """Copies, because MXNet may change the order of a weight's numbers."""
    return [nd.array(X, dtype=X.dtype) for X in inputs]


def as_float64(X: np.ndarray) -> np.ndarray:
    return X.astype(np.float64) if X.dtype == np.float32 else X


def _is_zero(text: str) -> bool:
    try:
        return float(text) == 0
    except ValueError:
        return False


def last_line(error: Exception) -> str:
    """The last line of a message, without where it comes from in MXNet's source."""
    line = str(error).strip().splitlines()[-1].strip()
    return re.sub(r"\[[\d:]+\] \S+: (?=Check)|(?<=operator )\d+_", "", line)  # `shapes` numbers the operators
