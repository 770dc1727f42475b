"""Writes a network as a PyTorch module: the graph as readable code, and the parameters as a safetensors file."""

from __future__ import annotations

import ast
import keyword
import os
import re
import sys
import textwrap
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from gluon_mgpu import __version__
from gluon_mgpu.convert.network import Network, Unsupported, load
from gluon_mgpu.convert.operators import FUNCTIONAL, LAYERS, RESHAPES, Node, find_rule, rnn
from gluon_mgpu.runtime import subprocesses
from gluon_mgpu.runtime.errors import UsageError

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
{functions}

class Net(nn.Module):
    """Inputs: {inputs}. Outputs: {outputs}."""

    def __init__(self):
        super().__init__()
{layers}
{train}
    def forward(self, {arguments}):
{forward}
        return {result}
'''
TRAIN = """
    def train(self, mode=True):
        super().train(mode)
        # As in MXNet, these layers always use their running statistics
{layers}
        return self
"""

# Loads a written module and its parameters as `net`, and the samples' inputs as `samples`
LOAD = """
import runpy, sys
import numpy as np, torch
from safetensors.torch import load_model

base = sys.argv[1]
for name in ("kaiming_uniform_", "uniform_", "normal_"):  # random values would be replaced
    setattr(torch.nn.init, name, lambda array, *_, **__: array)
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
SOURCES = "arange eye full identity ones zeros".split()  # operators without inputs, such as _zeros and _npi_zeros
FUNCTIONS = {
    node.name: node
    for node in ast.parse(Path(__file__).with_name("functions.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
}
WORDS = {"self", "torch", "nn", "F", "x", "y", "z", *FUNCTIONS}  # names that mean something else in the code

Entry = tuple[int, int]  # one output of a node: the node's index, and the index of the output


class Refused(UsageError):
    """Operators that cannot be converted. reasons: for each operator's name, its layers and why."""

    def __init__(self, problems: list[tuple[str, str, Unsupported]]) -> None:
        layers: dict[tuple[str, str], list[str]] = {}
        for op, name, why in problems:
            layers.setdefault((op, str(why)), []).append(repr(name))  # repr keeps line breaks out of the message
        words = [
            f"{op!r} layer {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} ({why})"
            for (op, why), names in layers.items()
        ]
        super().__init__(None, "; ".join(words), "cannot be converted to PyTorch")
        self.fixed_size = all(why.fixed_size for _, _, why in problems)  # whether all can for inputs of one size


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
        self.evaluated: list[str] = []  # code that sets layers to evaluation mode
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
            elif node["op"] == "_contrib_MultiBoxPrior":  # depends only on the size of the image
                constant, description = fixed, f"{node['op']} {i}"
            else:
                constant = None not in inputs and (bool(inputs) or fixed and node["op"].split("_")[-1] in SOURCES)
                description = str((node["op"], node.get("attrs"), inputs))
            if constant:
                found.update({(i, output): f"{description}[{output}]" for output in range(len(self.shapes[0][i]))})
        return found

    def _value(self, entry: Entry) -> np.ndarray:
        """Compute a constant."""
        if self.nodes[entry[0]]["op"] == "null":
            return self.network.params[self.nodes[entry[0]]["name"]]
        inputs = [i for i, node in enumerate(self.nodes) if node["name"] in self.network.inputs]
        heads = [[*entry, 0], *([i, 0, 0] for i in inputs)]  # MXNet cannot compute a graph without any input
        return self.network.evaluate(load({**self.network.graph, "heads": heads}), self.network.samples[0].inputs)[0]

    def _operands(self, i: int) -> tuple[list[Entry], list[Entry]]:
        """A node's inputs, and the parameters of its layer."""
        node = self.nodes[i]
        entries = [self._source((j, output)) for j, output, *_ in node["inputs"]]
        if not entries and (i, 0) not in self.constants:  # zeros whose shape depends on the inputs
            return [(self.first_input, 0)], []
        rule = find_rule(node["op"])
        if rule is rnn:  # without states that are zero, which is the default
            states = [entry for entry in entries[2:] if not self.nodes[entry[0]]["op"].endswith("zeros")]
            return [entries[0], *states], entries[1:2]
        is_layer = rule in LAYERS or node.get("attrs", {}).get("sample_type") == "bilinear"
        if rule in FUNCTIONAL and not self.constants.keys() >= {*entries[1:]}:
            is_layer = False
        return (entries[:1], entries[1:]) if is_layer else (entries, [])

    def _source(self, entry: Entry) -> Entry:
        """The entry that has the same value before operators that only copy it."""
        while (rule := find_rule(self.nodes[entry[0]]["op"])) == "{0}" or rule in RESHAPES:
            i, output, *_ = self.nodes[entry[0]]["inputs"][0]
            if any(shapes[i][output] != shapes[entry[0]][entry[1]] for shapes in self.shapes):
                break
            entry = i, output
        return entry

    def _steps(self, heads: list[Entry]) -> tuple[list[int], dict[Entry, list[int]]]:
        """The nodes that the outputs need, in order; and for each entry, the positions in this list of those that use
        it, from last to first. An output is used at the end."""
        steps, uses = list[int](), {head: [0] for head in heads}
        for i in reversed(range(len(self.nodes))):
            needed = any((i, output) in uses for output in range(len(self.shapes[0][i])))
            if needed and self.nodes[i]["op"] != "null" and (i, 0) not in self.constants:
                steps.insert(0, i)
                for entry in self._operands(i)[0]:
                    uses.setdefault(entry, []).append(-len(steps))
        return steps, {entry: [len(steps) + position for position in positions] for entry, positions in uses.items()}

    def _write(self) -> None:
        heads = [self._source((i, output)) for i, output, *_ in self.network.graph["heads"]]
        steps, uses = self._steps(heads)
        owners = [_block(self.nodes[i]["name"]) for i in steps if self._operands(i)[1]]
        # The network's name, with which all of these names begin.
        prefix = "".join(letters[0] for letters in takewhile(lambda letters: len({*letters}) == 1, zip(*owners)))
        self.prefix = prefix[: prefix.rfind("_") + 1]
        used, problems = set(WORDS), []
        inputs = {node["name"]: (i, 0) for i, node in enumerate(self.nodes) if node["name"] in self.network.inputs}
        variables = {inputs[name]: "x" if len(inputs) == 1 else _identifier(name, used) for name in self.network.inputs}
        self.arguments = list(variables.values())
        for at, i in enumerate(steps):
            operands, params = self._operands(i)
            live = [entry for entry in variables if uses.get(entry, [-1])[0] >= at]
            if self.forward and [len(uses[entry]) > 1 for entry in live] == [True]:
                self.forward.append("")  # between blocks of the network
            try:
                node = self._node(i, operands, params)
                code = node.code(*(variables.get(entry) or self._parameter(entry) for entry in operands))
            except Unsupported as why:
                problems.append((self.nodes[i]["op"], self.nodes[i]["name"], why))
                variables.update({(i, output): "x" for output in range(len(self.shapes[0][i]))})
                continue
            entries = [(i, output) for output in range(len(node.outputs))]
            kept = [entry for entry in entries if entry in uses]
            taken = {variables[entry] for entry in live if uses[entry][0] > at}
            for entry in kept:
                if len(kept) == 1 and set(uses[entry]) == {at + 1}:
                    variables[entry] = next(name for name in "xyz" if name not in taken)
                else:
                    name = _block(self.nodes[i]["name"]).removeprefix(self.prefix)
                    variables[entry] = _identifier(f"{name}{entry[1]}" if len(kept) > 1 else name, taken | WORDS)
            targets = [variables[entry] if entry in uses else "_" for entry in entries]
            if node.nested:  # (output, state), where the state of an LSTM is a tuple
                states = targets[1:] if {*targets[1:]} - {"_"} else ["_"]
                targets[1:] = [f"({', '.join(states)})" if len(states) > 1 else states[0]]
            self.forward.append(f"{', '.join(targets)} = {code}")
            self._add_layer(node, params)
        if problems:
            raise Refused(problems)
        self.result = ", ".join(variables.get(entry) or self._parameter(entry) for entry in heads)

    def _node(self, i: int, operands: list[Entry], params: list[Entry]) -> Node:
        node, layer = self.nodes[i], ""
        if not all(entry in self.constants for entry in params):
            raise Unsupported("its parameters are computed from the network's input")
        inputs = [[shapes[j][output] for shapes in self.shapes] for j, output in operands]
        if params:
            key = node["op"], str(node.get("attrs")), *(self.constants[entry] for entry in params), len(inputs[0][0])
            if key not in self.names:
                self.names[key] = self._name(node)
            layer = self.names[key]
        outputs = [list(shapes) for shapes in zip(*(shapes[i] for shapes in self.shapes))]
        arrays = [self._value(entry) for entry in params]
        return Node(node["op"], node.get("attrs", {}), layer, inputs, outputs, arrays)

    def _name(self, node: dict[str, Any]) -> str:
        """A new name for a layer or a parameter, similar to its name in the graph."""
        return _identifier(_block(node["name"]).removeprefix(self.prefix), self.taken)

    def _add_layer(self, node: Node, params: list[Entry]) -> None:
        line = f"self.{node.name} = {node.layer}"
        if not node.layer or line in self.layers:
            return
        self.layers.append(line)
        if node.evaluated:
            self.evaluated.append(f"self.{node.name}.eval()")
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

    def functions(self) -> list[str]:
        """The code of the functions that forward calls."""
        text, called = "\n".join(self.forward), dict[str, str]()
        for name in reversed(FUNCTIONS):  # a function calls only those before it
            if re.search(rf"\b{name}\(", text):
                called[name] = ast.unparse(FUNCTIONS[name])
                text += called[name]
        return list(called.values())[::-1]


def _block(name: str) -> str:
    """The name of the Gluon block that contains an operator: conv0 for conv0_fwd, lstm0_i2h for lstm0_t5_i2h."""
    return re.sub(r"_t\d+(?=_)|_(fwd|(group|layer)norm0|rnn0)$", "", name)


def _identifier(name: str, others: set[str]) -> str:
    """Convert a name to an identifier that is not in `others`, and add the identifier to `others`."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_")
    if not name[:1].isalpha():
        name = f"layer{name}"
    while keyword.iskeyword(name) or name in others:
        name += "_"
    others.add(name)
    return name


def _indent(lines: list[str]) -> str:
    """The code inside a method. Long lines are split inside their brackets."""
    result = list[str]()
    for line in lines:
        first, last = line.find("("), line.rfind(")")
        if len(line) > 112 and 0 < first < last:
            parts = textwrap.wrap(line[first + 1 : last], 108, break_long_words=False, break_on_hyphens=False)
            result += [line[: first + 1], *(f"    {part}" for part in parts), line[last:]]
        else:
            result.append(line)
    return textwrap.indent("\n".join(result), " " * 8)


def write(network: Network, base: str) -> None:
    """Write BASE.py and BASE.safetensors. BASE's last part must be an identifier.

    Raises Refused if operators cannot be converted.
    """
    from safetensors.numpy import save_file

    module = _Module(network)
    inputs = [f"{_identifier(name, set())} ({', '.join(map(str, network.axes(name)))})" for name in network.inputs]
    code = MODULE.format(
        version=__version__,
        name=os.path.basename(base),
        functions="".join(f"\n\n{function}\n" for function in module.functions()),
        inputs=", ".join(inputs),
        outputs=", ".join(_identifier(name, set()) for name in network.outputs),
        layers=_indent(module.layers or ["pass"]),
        train=TRAIN.format(layers=_indent(module.evaluated)) if module.evaluated else "",
        arguments=", ".join(module.arguments),
        forward=_indent(module.forward),
        result=module.result,
    )
    Path(f"{base}.py").write_text(code, encoding="utf-8")
    save_file(module.state, f"{base}.safetensors")


def load_and_run(network: Network, base: str, program: str) -> None:
    """Run a program in a new process, after the written files have been loaded."""
    inputs = {f"{i} {k}": X for i, sample in enumerate(network.samples) for k, X in enumerate(sample.inputs)}
    np.savez(f"{base}.npz", **inputs)
    subprocesses.raise_for_status("PyTorch", subprocesses.run([sys.executable, "-c", LOAD + program, base]))


def outputs(network: Network, base: str) -> list[list[np.ndarray]]:
    """Load the written files in a new process, and compute the outputs for each of the network's samples."""
    load_and_run(network, base, RUN)
    with np.load(f"{base}.npz") as arrays:
        return [[arrays[f"{i} {k}"] for k in range(len(sample.outputs))] for i, sample in enumerate(network.samples)]
