"""Writes a network as a PyTorch module: the graph as readable code, and the parameters as a safetensors file."""

from __future__ import annotations

import itertools
import json
import keyword
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd

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
    net.eval()  # for inference; omit it to continue the training
"""

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    """Input: {input}. Output: {output}."""

    def __init__(self):
        super().__init__()
{layers}

    def forward(self, {arguments}):
{forward}
        return {result}
'''

# Loads a written module and its parameters as `net`, and the samples' inputs as `samples`
LOAD = """
import runpy, sys
import numpy as np, torch
from safetensors.torch import load_model

base = sys.argv[1]
net = runpy.run_path(base + ".py")["Net"]()
load_model(net, base + ".safetensors")
net.eval()
with np.load(base + ".npz") as arrays:
    samples = {}
    for name in arrays:
        samples.setdefault(name.split()[0], []).append(torch.from_numpy(arrays[name]))
"""
RUN = """
results = {}
for sample, inputs in samples.items():
    with torch.no_grad():
        outputs = net(*inputs)
    for i, output in enumerate(outputs if isinstance(outputs, tuple) else [outputs]):
        results[f"{sample} {i}"] = output.numpy()
np.savez(base + ".npz", **results)
"""

# Attributes of nn.Module that a layer must not replace
TAKEN = """apply buffers children compile cpu cuda double eval float forward half load_state_dict modules
    parameters state_dict to train training type zero_grad""".split()
SOURCES = ("arange", "eye", "full", "ones", "zeros")  # operators without inputs, such as _zeros and _npi_zeros

Entry = tuple[int, int]  # one output of a node: the node's index, and the index of the output


class _Module:
    """Generates the code of a module, node by node."""

    def __init__(self, network: Network) -> None:
        self.network, self.nodes = network, network.graph["nodes"]
        sizes = dict.fromkeys(tuple(X.shape for X in sample.inputs) for sample in network.samples)
        self.shapes = list(map(network.shapes, sizes))  # for each sample, then for each node and output
        self.first_input = next(i for i, node in enumerate(self.nodes) if node["name"] == network.inputs[0])
        self.constants = self._constants()
        self.layers: list[str] = []  # code that creates the layers
        self.forward: list[str] = []  # code that applies them
        self.state: dict[str, np.ndarray] = {}
        self.owners: dict[str, str] = {}  # {description of a constant: its name in the state dict}
        self.names: dict[tuple[Any, ...], str] = {}  # {description of a layer: its name in the module}
        self.taken = set(TAKEN)
        self._write()

    def _constants(self) -> dict[Entry, str]:
        """Find the entries that do not depend on the inputs. Equal entries have the same description."""
        found: dict[Entry, str] = {}
        for i, node in enumerate(self.nodes):
            inputs = [found.get((j, output)) for j, output, *_ in node["inputs"]]
            fixed = len({str(shapes[i]) for shapes in self.shapes}) == 1
            if node["op"] == "null":
                constant, description = node["name"] in self.network.params, node["name"]
            else:
                constant = None not in inputs and (bool(inputs) or fixed and node["op"].split("_")[-1] in SOURCES)
                description = str((node["op"], node.get("attrs"), inputs))
            if constant:
                found.update({(i, output): f"{description}[{output}]" for output in range(len(self.shapes[0][i]))})
        return found

    def _value(self, entry: Entry) -> np.ndarray:
        """Compute a constant."""
        if self.nodes[entry[0]]["op"] == "null":
            return self.network.params[self.nodes[entry[0]]["name"]].asnumpy()
        heads = [[*entry, 0], [self.first_input, 0, 0]]  # MXNet cannot compute a graph without any input
        symbol = mx.sym.load_json(json.dumps({**self.network.graph, "heads": heads}))
        return self.network.evaluate(symbol, {self.network.inputs[0]: nd.zeros(1)})[0]

    def _operands(self, i: int) -> tuple[list[Entry], list[Entry]]:
        """A node's inputs, and the parameters of its layer."""
        node = self.nodes[i]
        entries = [(j, output) for j, output, *_ in node["inputs"]]
        if not entries and (i, 0) not in self.constants:  # zeros whose shape depends on the inputs
            return [(self.first_input, 0)], []
        if node["op"] == "RNN":  # without states that are zero, which is the default
            states = [entry for entry in entries[2:] if not self.nodes[entry[0]]["op"].endswith("zeros")]
            return [entries[0], *states], entries[1:2]
        return (entries[:1], entries[1:]) if node["op"] in LAYERS else (entries, [])

    def _steps(self, heads: list[Entry]) -> tuple[list[int], dict[Entry, int]]:
        """The nodes that the outputs need, in order; and for each entry, the last node that uses it."""
        steps, last_use = list[int](), dict.fromkeys(heads, len(self.nodes))
        for i in reversed(range(len(self.nodes))):
            needed = any((i, output) in last_use for output in range(len(self.shapes[0][i])))
            if needed and self.nodes[i]["op"] != "null" and (i, 0) not in self.constants:
                steps.insert(0, i)
                for entry in self._operands(i)[0]:
                    last_use.setdefault(entry, i)
        return steps, last_use

    def _write(self) -> None:
        heads = [(i, output) for i, output, *_ in self.network.graph["heads"]]
        steps, last_use = self._steps(heads)
        owners = [_block(self.nodes[i]["name"]) for i in steps if self._operands(i)[1]]
        prefix = os.path.commonprefix(owners)  # the network's name, with which all of these names begin
        self.prefix = prefix[: prefix.rfind("_") + 1]
        used = {"self", "torch", "nn", "F"}
        inputs = {node["name"]: (i, 0) for i, node in enumerate(self.nodes) if node["name"] in self.network.inputs}
        variables = {inputs[name]: "x" if len(inputs) == 1 else _identifier(name, used) for name in self.network.inputs}
        self.arguments = list(variables.values())
        names = itertools.chain("xyz", (f"x{i}" for i in itertools.count(3)))
        new_names = (name for name in names if name not in {*used, *self.arguments})
        free: list[str] = []  # variables whose value is no longer needed
        for i in steps:
            operands, params = self._operands(i)
            node = self._node(i, operands, params)
            code = node.code(*(variables.get(entry) or self._parameter(entry) for entry in operands))
            ended = [entry for entry in dict.fromkeys(operands[::-1]) if last_use[entry] == i and entry in variables]
            free += [variables[entry] for entry in ended]
            entries = [(i, output) for output in range(len(node.outputs))]
            for entry in entries:
                if entry in last_use:
                    variables[entry] = free.pop() if free else next(new_names)
            targets = [variables.get(entry, "_") for entry in entries]
            if node.nested:  # (output, state), where the state of an LSTM is a tuple
                states = targets[1:] if {*targets[1:]} - {"_"} else ["_"]
                targets[1:] = [f"({', '.join(states)})" if len(states) > 1 else states[0]]
            if code != targets[0]:
                self.forward.append(f"{', '.join(targets)} = {code}")
            self._add_layer(node, params)
        self.result = ", ".join(variables.get(entry) or self._parameter(entry) for entry in heads)

    def _node(self, i: int, operands: list[Entry], params: list[Entry]) -> Node:
        node, layer = self.nodes[i], ""
        if node["op"] not in OPERATORS:
            raise refuse(node["op"], node["name"])
        if not all(entry in self.constants for entry in params):
            raise refuse(node["op"], node["name"], "its parameters are computed from the network's input")
        inputs = [[shapes[j][output] for shapes in self.shapes] for j, output in operands]
        if params:
            key = node["op"], str(node.get("attrs")), *(self.constants[entry] for entry in params), len(inputs[0][0])
            if key not in self.names:
                self.names[key] = self._name(node)
            layer = self.names[key]
        outputs = [list(shapes) for shapes in zip(*(shapes[i] for shapes in self.shapes))]
        arrays = [self._value(entry) for entry in params]
        return Node(node["op"], node["name"], node.get("attrs", {}), layer, inputs, outputs, arrays)

    def _name(self, node: dict[str, Any]) -> str:
        """A new name for a layer or a parameter, similar to its name in the graph."""
        return _identifier(_block(node["name"]).removeprefix(self.prefix), self.taken)

    def _add_layer(self, node: Node, params: list[Entry]) -> None:
        line = f"self.{node.name} = {node.layer}"
        if not node.layer or line in self.layers:
            return
        self.layers.append(line)
        if node.frozen:
            self.layers.append(f"self.{node.name}.weight.requires_grad_(False)  # as in MXNet, always 1")
        for k, (name, array) in enumerate(node.state.items()):
            same = len(params) == len(node.state)  # an RNN has one array for all of its parameters
            description = self.constants[params[k]] if same else f"{self.constants[params[0]]}[{k}]"
            if description in self.owners:
                self.layers.append(f"self.{name} = self.{self.owners[description]}  # shared, as in MXNet")
            else:
                self.owners[description], self.state[name] = name, array

    def _parameter(self, entry: Entry) -> str:
        """The code for a constant that is not a layer's parameter. Creates it if necessary."""
        description, node = self.constants[entry], self.nodes[entry[0]]
        trained = node["op"] == "null" and self._value(entry).dtype == np.float32
        owner = description if trained else f"buffer {description}"  # a layer may have the same array as a parameter
        if owner not in self.owners:
            name, array = self._name(node), self._value(entry)
            self.owners[owner], self.state[name] = name, array
            zeros = f"torch.zeros({array.shape}, dtype=torch.{array.dtype})"
            self.layers.append(
                f"self.{name} = nn.Parameter({zeros})" if trained else f'self.register_buffer("{name}", {zeros})'
            )
        return f"self.{self.owners[owner]}"


def _block(name: str) -> str:
    """The name of the Gluon block that contains an operator: conv0 for conv0_fwd."""
    return re.sub(r"_(fwd|(group|layer)norm0|rnn0)$", "", name)


def _identifier(name: str, others: set[str]) -> str:
    """Convert a name to an identifier that is not in `others`, and add the identifier to `others`."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_")
    if not name[:1].isalpha():
        name = f"layer{name}"
    while keyword.iskeyword(name) or name in others:
        name += "_"
    others.add(name)
    return name


def write(network: Network, base: str) -> None:
    """Write BASE.py and BASE.safetensors. BASE's last part must be an identifier.

    Raises UsageError for the first operator that cannot be converted.
    """
    from safetensors.numpy import save

    module = _Module(network)
    inputs, outputs = (
        ", ".join(f"({', '.join(['n', *map(str, array.shape[1:])])})" for array in arrays)
        for arrays in network.samples[0]
    )
    code = MODULE.format(
        version=__version__,
        name=os.path.basename(base),
        input=inputs,
        output=outputs,
        layers=textwrap.indent("\n".join(module.layers), " " * 8),
        arguments=", ".join(module.arguments),
        forward=textwrap.indent("\n".join(module.forward), " " * 8),
        result=module.result,
    )
    Path(f"{base}.py").write_text(code, encoding="utf-8")
    state = {name: np.ascontiguousarray(array) for name, array in module.state.items()}
    Path(f"{base}.safetensors").write_bytes(save(state))


def load_and_run(network: Network, base: str, program: str) -> None:
    """Run a program in a new process, after the written files have been loaded."""
    inputs = {f"{i} {k}": X for i, sample in enumerate(network.samples) for k, X in enumerate(sample.inputs)}
    np.savez(f"{base}.npz", **inputs)
    subprocesses.check("PyTorch", subprocesses.run([sys.executable, "-c", LOAD + program, base]))


def outputs(network: Network, base: str) -> list[list[np.ndarray]]:
    """Load the written files in a new process, and compute the outputs for each of the network's samples."""
    load_and_run(network, base, RUN)
    with np.load(f"{base}.npz") as arrays:
        return [[arrays[f"{i} {k}"] for k in range(len(sample.outputs))] for i, sample in enumerate(network.samples)]
