"""Writes a network as a PyTorch module: the graph as readable code, and the parameters as a safetensors file."""

from __future__ import annotations

import itertools
import keyword
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gluon_mgpu import __version__
from gluon_mgpu.convert.network import Network, refuse
from gluon_mgpu.convert.operators import LAYERS, OPERATORS, Node
from gluon_mgpu.runtime import subprocesses

SUFFIXES = (".py", ".safetensors")
PACKAGES = ("torch", "safetensors")
USAGE = "the docstring of {prefix}.py shows how to load the network"

MODULE = '''"""A network converted from MXNet by gluon_mgpu {version}. To load the network and its parameters:

    from safetensors.torch import load_model

    from {name} import Net

    net = Net()
    load_model(net, "{name}.safetensors")
"""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Input: {input}. Output: {output}."""

    def __init__(self):
        super().__init__()
{layers}

    def forward(self, x):
{forward}
        return {result}
'''

LOAD = """
import runpy, sys
import numpy as np, torch
from safetensors.torch import load_model

base = sys.argv[1]
net = runpy.run_path(base + ".py")["Net"]()
load_model(net, base + ".safetensors")
net.eval()
with np.load(base + ".npz") as batches, torch.no_grad():
    scores = [net(torch.from_numpy(X)) for X in batches.values()]
np.save(base + ".npy", torch.cat(scores).numpy())
"""

# Attributes of nn.Module that a layer must not replace
TAKEN = """apply buffers children compile cpu cuda double eval float forward half load_state_dict modules
    parameters state_dict to train training type zero_grad""".split()


def translate(network: Network, name: str) -> tuple[str, dict[str, np.ndarray]]:
    """Generate a module's code and its state dict. name: the module's name, which must be an identifier.

    Raises UsageError for the first operator that cannot be converted.
    """
    operators = list(_operators(network))
    last_use = {value: node.step for node in operators for value in node.inputs}
    new_names = itertools.chain("yz", (f"x{i}" for i in itertools.count(3)))
    variables: dict[int, str] = {}  # {step: variable that holds its result}
    free: list[str] = []  # variables whose value is no longer needed
    layers, forward, state = [], [], {}
    created, names = set[str](), dict[str, str]()  # layers; {parameter in the graph: its name in the state dict}
    for node in operators:
        for value in node.inputs:
            variables.setdefault(value, "x")  # the network's input; earlier steps compute all other values
        code = node.code(*(variables[value] for value in node.inputs))
        free += [variables[value] for value in dict.fromkeys(node.inputs[::-1]) if last_use[value] == node.step]
        variables[node.step] = free.pop() if free else next(new_names)
        if code != variables[node.step]:
            forward.append(f"{variables[node.step]} = {code}")
        if not node.layer or node.name in created:
            continue
        created.add(node.name)
        layers.append(f"self.{node.name} = {node.layer}")
        if node.frozen:
            layers.append(f"self.{node.name}.weight.requires_grad_(False)  # as in MXNet, always 1")
        for param, (name, array) in zip(node.params, node.state.items()):
            if param in names:
                layers.append(f"self.{name} = self.{names[param]}  # shared, as in MXNet")
            else:
                names[param], state[name] = name, array
    code = MODULE.format(
        version=__version__,
        name=name,
        input=_shape(network.images),
        output=_shape(network.expected),
        layers="\n".join(f"        {line}" for line in layers),
        forward="\n".join(f"        {line}" for line in forward),
        result=variables[operators[-1].step],
    )
    return code, state


def _operators(network: Network) -> Iterator[Node]:
    """Yields the graph's operators in order. Raises UsageError if one of them cannot be converted."""
    graph = network.nodes
    shapes = network.shapes()
    params = {i: node["name"] for i, node in enumerate(graph) if node["op"] == "null" and node["name"] != network.input}
    owners = [_block(node["name"]) for node in graph if params.keys() & {i for i, *_ in node["inputs"]}]
    prefix = os.path.commonprefix(owners)  # the network's name, with which all of these names begin
    prefix = prefix[: prefix.rfind("_") + 1]
    taken, names = set(TAKEN), dict[str, str]()  # {layer's description in the graph: its name in the module}
    for step, facts in enumerate(graph):
        if facts["op"] == "null":
            continue
        if facts["op"] not in OPERATORS:
            raise refuse(facts, "PyTorch")
        if any(output for _, output, *_ in facts["inputs"]):
            raise refuse(facts, "PyTorch", "it uses an output other than the first of another layer")
        inputs = [i for i, *_ in facts["inputs"] if i not in params]
        own = [params[i] for i, *_ in facts["inputs"] if i in params]
        if own and facts["op"] not in LAYERS:
            raise refuse(facts, "PyTorch", f"its use of the parameter {own[0]!r} is not supported")
        shape = shapes[graph[facts["inputs"][0][0]]["name"]]
        layer = str((facts["op"], facts.get("attrs"), own, len(shape)))
        if own and layer not in names:
            names[layer] = _identifier(_block(facts["name"]).removeprefix(prefix), taken)
        arrays = [network.params[param].asnumpy() for param in own]
        yield Node(step, facts, names.get(layer, ""), inputs, shape, own, arrays)


def _block(name: str) -> str:
    """The name of the Gluon block that contains an operator: conv0 for conv0_fwd."""
    return re.sub(r"_(fwd|(group|layer)norm0)$", "", name)


def _identifier(name: str, others: set[str]) -> str:
    """Convert a name to an identifier that is not in `others`, and add the identifier to `others`."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_")
    if not name[:1].isalpha():
        name = f"layer{name}"
    while keyword.iskeyword(name) or name in others:
        name += "_"
    others.add(name)
    return name


def _shape(batch: np.ndarray) -> str:
    return f"({', '.join(['n', *map(str, batch.shape[1:])])})"


def write(network: Network, base: str) -> None:
    """Write BASE.py and BASE.safetensors. Exceptions: see `translate`."""
    from safetensors.numpy import save

    code, state = translate(network, os.path.basename(base))
    Path(f"{base}.py").write_text(code, encoding="utf-8")
    Path(f"{base}.safetensors").write_bytes(save(state))


def scores(network: Network, base: str) -> np.ndarray:
    """Load the written files in a new process, and compute the scores of the network's images."""
    np.savez(f"{base}.npz", *network.batches())
    subprocesses.check("PyTorch", subprocesses.run([sys.executable, "-c", LOAD, base]))
    return np.load(f"{base}.npy")
