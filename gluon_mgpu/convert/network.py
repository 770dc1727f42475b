"""An exported Gluon network: its graph, its parameters, and images with the scores that a conversion must reproduce."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import gluon, nd
from mxnet.ndarray import NDArray

from gluon_mgpu import evaluate, highlevel, implementations
from gluon_mgpu.runtime.errors import Error, UsageError

MOST_TEST_IMAGES = 1000
RANDOM_IMAGES = 8
BATCH_SIZE = 100
TRUE = ("True", "1")  # how the graph file represents true


@dataclass
class Network:
    """A network that maps a batch of images (n, ...) to a batch of scores (n, ...)."""

    symbol: mx.sym.Symbol
    params: dict[str, NDArray]  # float32; running statistics are included
    input: str  # the name of the input
    images: np.ndarray  # float32
    expected: np.ndarray  # MXNet's scores for the images

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """The graph's nodes, in topological order: operators, parameters and the input."""
        return json.loads(self.symbol.tojson())["nodes"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns {name: shape} for the input, the parameters and the operators with one output, for a batch of 1."""
        internals = self.symbol.get_internals()
        _, shapes, _ = internals.infer_shape(**{self.input: (1, *self.images.shape[1:])})
        return {name.removesuffix("_output"): shape for name, shape in zip(internals.list_outputs(), shapes)}

    def batches(self) -> Iterator[np.ndarray]:
        """The images, in batches of different sizes."""
        yield self.images[:1]
        for start in range(1, len(self.images), BATCH_SIZE):
            yield self.images[start : start + BATCH_SIZE]

    def relative_error(self, found: np.ndarray) -> float:
        """The largest |found - expected| / |expected| of any image, where |x| is the Euclidean norm."""
        if found.shape != self.expected.shape:
            raise Error(f"scores have shape {found.shape} instead of {self.expected.shape}; nothing was written")
        expected = self.expected.reshape(len(found), -1).astype(np.float64)
        difference = np.linalg.norm(found.reshape(expected.shape) - expected, axis=1)
        return float(np.max(difference / np.maximum(np.linalg.norm(expected, axis=1), np.finfo(np.float32).tiny)))


def refuse(node: dict[str, Any], target: str, why: str = "") -> UsageError:
    """The error for an operator that cannot be converted. repr keeps line breaks in names out of the message."""
    return UsageError(f"{node['op']!r} layer {node['name']!r} cannot be converted to {target}{why and ': '}{why}")


def from_run(folder: str | Path, impl: str | None = None, data_dir: str | Path | None = None) -> Network:
    """Load a run's network, with test images and the scores that impl computes (None: the run's own implementation).

    Raises UsageError if the network is not a HybridBlock. Other exceptions: see `evaluate.load` and
    `evaluate.held_out`.
    """
    trained = evaluate.load(folder, impl, device="cpu")
    images = evaluate.held_out(trained.settings, data_dir)[0][:MOST_TEST_IMAGES]
    settings = replace(trained.settings, tune=False, hybridize=True)
    plain = implementations.GluonReplicas(highlevel, [mx.cpu()], settings)
    if not isinstance(plain.net, gluon.HybridBlock):
        raise UsageError(f"{folder}: {trained.settings.model} is not a HybridBlock, so it cannot be converted")
    plain.load_state_dict(trained.parameters)
    plain.predict(nd.zeros((1, 1, 28, 28)))  # export needs a graph
    with tempfile.TemporaryDirectory() as temporary:
        plain.net.export(f"{temporary}/net")
        symbol, params = _read(f"{temporary}/net-symbol.json", f"{temporary}/net-0000.params")
    return Network(symbol, params, "data", np.divide(images, 255, dtype=np.float32), evaluate.scores(trained, images))


def from_files(symbol_file: str | Path, params_file: str | Path, shape: tuple[int, ...]) -> Network:
    """Load a network that HybridBlock.export wrote, and draw random images in [0, 1).

    shape: the shape of one image, such as (1, 28, 28). If the network has an Embedding layer, each "image" is a
    sequence of random word indices, with a shape such as (35,) for 35 words.
    Raises UsageError if the files do not contain such a network, or if it does not accept images of this shape.
    """
    symbol, params = _read(symbol_file, params_file)
    inputs = [name for name in symbol.list_inputs() if name not in params]
    if len(inputs) != 1 or len(symbol.list_outputs()) != 1:
        raise UsageError(
            f"{symbol_file}: only networks with one input and one output can be converted; this network has "
            f"{len(symbol.list_outputs())} outputs and {len(inputs)} inputs that are not in {params_file}: "
            f"{', '.join(map(repr, inputs[:3]))}"
        )
    images = np.random.default_rng(0).random((RANDOM_IMAGES, *shape), np.float32)
    nodes = json.loads(symbol.tojson())["nodes"]
    words = [int(node["attrs"]["input_dim"]) for node in nodes if node["op"] == "Embedding"]
    if words:
        images = np.floor(images * min(words))
    try:
        expected = predict(symbol_file, params_file, inputs[0], [images])
        return Network(symbol, params, inputs[0], images, expected)
    except (mx.MXNetError, ValueError) as error:
        sizes = ",".join(map(str, shape))
        raise UsageError(f"input={sizes}: {symbol_file} does not accept this shape ({_last_line(error)})") from None


def predict(symbol_file: str | Path, params_file: str | Path, input: str, batches: Iterable[np.ndarray]) -> np.ndarray:
    """Load an exported network with Gluon, and compute its scores for batches of images."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet warns if the graph does not specify its input's type
        block = gluon.SymbolBlock.imports(str(symbol_file), [input], str(params_file), mx.cpu(), ignore_extra=True)
    return np.concatenate([block(nd.array(X)).asnumpy() for X in batches])


def _read(symbol_file: str | Path, params_file: str | Path) -> tuple[mx.sym.Symbol, dict[str, NDArray]]:
    for file in (symbol_file, params_file):
        if not Path(file).is_file():
            raise UsageError(f"{file} does not exist")
    try:
        symbol, arrays = mx.sym.load(str(symbol_file)), nd.load(str(params_file))
    except mx.MXNetError as error:
        raise UsageError(f"{symbol_file}, {params_file}: not an exported network ({_last_line(error)})") from None
    if not isinstance(arrays, dict) or any(array.dtype != np.float32 for array in arrays.values()):
        raise UsageError(f"{params_file}: only named float32 parameters can be converted")
    params = {name.removeprefix("arg:").removeprefix("aux:"): array for name, array in arrays.items()}
    nodes = json.loads(symbol.tojson())["nodes"]
    for node in nodes:
        if node["op"] == "BatchNorm" and node.get("attrs", {}).get("fix_gamma", "True") in TRUE:
            gamma = params.get(nodes[node["inputs"][1][0]]["name"])
            if gamma is not None:
                gamma[:] = 1  # MXNet ignores the file's value
    return symbol, params


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
