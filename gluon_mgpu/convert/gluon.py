"""Writes a network in the format of HybridBlock.export."""

from __future__ import annotations

import numpy as np
from mxnet import nd

from gluon_mgpu.convert.network import Network, predict

SUFFIXES = ("-symbol.json", "-0000.params")
PACKAGES = ()
USAGE = "load it with gluon.SymbolBlock.imports('{prefix}-symbol.json', ['{input}'], '{prefix}-0000.params')"


def write(network: Network, base: str) -> None:
    """Write BASE-symbol.json and BASE-0000.params."""
    running = set(network.symbol.list_auxiliary_states())
    network.symbol.save(f"{base}-symbol.json")
    arrays = {f"{'aux' if name in running else 'arg'}:{name}": array for name, array in network.params.items()}
    nd.save(f"{base}-0000.params", arrays)


def scores(network: Network, base: str) -> np.ndarray:
    """Load the written files and compute the scores of the network's images."""
    return predict(f"{base}-symbol.json", f"{base}-0000.params", network.input, network.batches())
