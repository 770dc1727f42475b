"""Writes a network in the format of HybridBlock.export."""

from __future__ import annotations

import warnings

import mxnet as mx
import numpy as np
from mxnet import gluon, nd

from gluon_mgpu.convert.exported import Exported, as_arrays

SUFFIXES = ("-symbol.json", "-0000.params")
PACKAGES = ()
USAGE = "load it with gluon.SymbolBlock.imports('{prefix}-symbol.json', {inputs}, '{prefix}-0000.params')"


def write(network: Exported, base: str) -> None:
    """Write BASE-symbol.json and BASE-0000.params."""
    symbol = network.symbol
    running = set(symbol.list_auxiliary_states())
    symbol.save(f"{base}-symbol.json")
    names = [f"{'aux' if name in running else 'arg'}:{name}" for name in network.params]
    with network.np_shape():
        nd.save(f"{base}-0000.params", dict(zip(names, as_arrays(network.params.values()))))


def outputs(network: Exported, base: str) -> list[list[np.ndarray]]:
    """Load the written files, and compute the outputs for each of the network's samples."""
    with network.np_shape(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MXNet warns if the graph does not specify its input's type
        files = f"{base}-symbol.json", network.inputs, f"{base}-0000.params"
        block = gluon.SymbolBlock.imports(*files, ctx=mx.cpu(), ignore_extra=True)
        results = [block(*as_arrays(sample.inputs)) for sample in network.samples]
        return [[Y.asnumpy() for Y in (Ys if isinstance(Ys, (list, tuple)) else [Ys])] for Ys in results]
