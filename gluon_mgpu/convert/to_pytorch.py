"""Writes a network as a PyTorch module: the graph as readable code, and the parameters as a safetensors file."""

from __future__ import annotations

import ast
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

import gluon_mgpu.convert.gradients as gradients
from gluon_mgpu import __version__
from gluon_mgpu.convert.blocks import (
    TAKEN,
    Class,
    Entry,
    Layer,
    Operand,
    Parameter,
    Statement,
    find,
    identifier,
    join,
    layers_of,
)
from gluon_mgpu.convert.exported import Exported, Unsupported
from gluon_mgpu.convert.loops import Carried, Elements, Loop, roll
from gluon_mgpu.convert.operators import FUNCTIONAL, LAYERS, RESHAPES, Node, find_rule, reshape, rnn
from gluon_mgpu.support import subprocesses
from gluon_mgpu.support.errors import UsageError

SUFFIXES = (".py", ".safetensors")
PACKAGES = ("torch", "safetensors", "ruff")
USAGE = "the docstring of {prefix}.py shows how to load the network"

MODULE = '''"""A network converted from MXNet by gluon_mgpu {version}.

To load the network and its parameters:

    from safetensors.torch import load_model

    from {name} import Net

    net = Net()
    load_model(net, "{name}.safetensors")
    net.eval()  # for inference; omit it to continue the training
"""

import torch
from torch import nn
from torch.nn import functional as F
{definitions}

class Net(nn.Module):
    """{docstring}"""

{net}
'''
INIT = """
    def __init__({arguments}):
        super().__init__()
{layers}
"""
TRAIN = """
    def train(self, mode=True):
        super().train(mode)
        # As in MXNet, these layers always use their running statistics
{layers}
        return self
"""
FORWARD = """
    def forward({arguments}):
{lines}"""

LINE_LENGTH = 100
MOST_TARGETS = 4  # variables to which one line assigns
# Options of layers that need not be written
DEFAULT = re.compile(r", (stride=1|padding=0|output_padding=0|dilation=1|groups=1|bias=True)(?=[,)])")
SOURCES = (
    "arange blackman eye full hamming hanning identity indices linspace logspace ones zeros".split()
)  # operators without inputs, such as _zeros and _npi_zeros
FUNCTIONS = {
    node.name: node
    for node in ast.parse(Path(__file__).with_name("functions.py").read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef)
}
WORDS = {"self", "torch", "nn", "F", "x", "y", "z", *FUNCTIONS}  # names that mean something else in the code


class Refused(UsageError):
    """Operators that cannot be converted: for each its name, its layer and why. outputs: what comes before them."""

    def __init__(self, problems: list[tuple[str, str, Unsupported]], outputs: Sequence[str] = ()) -> None:
        layers: dict[tuple[str, str], list[str]] = {}
        for op, name, why in problems:
            layers.setdefault((op, str(why)), []).append(repr(name))  # repr keeps line breaks out of the message
        words = [
            f"{op!r} layer {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} ({why})"
            for (op, why), names in layers.items()
        ]
        advice = "cannot be converted to PyTorch"
        if outputs:
            advice += f"; {' '.join(f'--output {name}' for name in outputs)} converts the part before"
        super().__init__(None, "; ".join(words), advice)
        self.fixed_size = all(why.fixed_size for _, _, why in problems)  # whether all can for inputs of one size


class _Converter:
    """Converts a graph to steps, node by node."""

    def __init__(self, network: Exported) -> None:
        self.network, self.nodes = network, network.graph.nodes
        sizes = dict.fromkeys(tuple(X.shape for X in sample.inputs) for sample in network.samples)
        self.shapes = list(map(network.shapes, sizes))  # for each sample, then for each node and output
        self.trained, self.users = gradients.trained(network), dict[int, set[int]]()
        for i, node in enumerate(self.nodes):
            for j, _ in node.inputs:
                self.users.setdefault(j, set()).add(i)
        self.packed = self._packed()
        self.names = {id(array): name for name, array in network.params.items()}  # of arrays that are in the file
        self.first_input = next(i for i, node in enumerate(self.nodes) if node.name == network.inputs[0])
        self.constants = self._constants()
        self.owners: dict[str, Parameter] = {}  # {description of a constant: its parameter}
        self.layers: dict[tuple[Any, ...], Layer] = {}  # by their description
        self.taken, self.prefix = set(TAKEN), ""  # prefix: the network's name, with which the layers' names begin

    def _constants(self) -> dict[Entry, str]:
        """Find the parameters, and what depends neither on inputs nor on parameters that train. Equal entries have the
        same description."""
        found: dict[Entry, str] = {}
        for i, node in enumerate(self.nodes):
            inputs = [found.get(entry) for entry in node.inputs]
            fixed = len({str(shapes[i]) for shapes in self.shapes}) == 1
            fixed &= not re.search(r"\b0\b", node.attrs.get("shape", ""))  # begin_state
            if node.op == "null":
                constant, description = node.name in self.network.params, node.name
            elif node.op == "_contrib_MultiBoxPrior":  # depends only on the size of the image
                constant, description = fixed, f"{node['op']} {i}"
            else:
                constant = None not in inputs and (bool(inputs) or fixed and node.op.split("_")[-1] in SOURCES)
                constant &= not any(map(self._trains, node.inputs)) or i in self.packed
                description = str((node.op, node.attrs, inputs))
            if constant:
                found.update({(i, output): f"{description}[{output}]" for output in range(len(self.shapes[0][i]))})
        return found

    def _packed(self) -> set[int]:
        """The nodes that only pack the parameters of a recurrent layer into one array. nn.LSTM has them unpacked."""
        last = {i for i, node in enumerate(self.nodes) if node.op == "_rnn_param_concat"}
        reshapes = (i for i, node in enumerate(self.nodes) if find_rule(node.op) is reshape)
        return last | {i for i in reshapes if self._users(i) <= last}

    def _users(self, i: int) -> set[int]:
        return self.users.get(i, {-1})

    def _trains(self, entry: Entry) -> bool:
        """Whether an entry is a parameter that MXNet trains."""
        return self.nodes[entry[0]].op == "null" and self.nodes[entry[0]].name in self.trained

    def _value(self, entry: Entry) -> np.ndarray:
        """Compute a constant."""
        if self.nodes[entry[0]].op == "null":
            return self.network.params[self.nodes[entry[0]].name]
        inputs = [i for i, node in enumerate(self.nodes) if node.name in self.network.inputs]
        heads = [entry, *((i, 0) for i in inputs)]  # MXNet cannot compute a graph without any input
        return self.network.evaluate(self.network.graph.symbol(heads), self.network.samples[0].inputs)[0]

    def _operands(self, i: int) -> tuple[list[Entry], list[Entry]]:
        """A node's inputs, and the parameters of its layer."""
        node = self.nodes[i]
        entries = [*map(self._source, node.inputs)]
        if not entries and (i, 0) not in self.constants:  # zeros whose shape depends on the inputs
            return [(self.first_input, 0)], []
        rule = find_rule(node.op)
        if rule is rnn:  # without states that are zero, which is the default
            states = [entry for entry in entries[2:] if not self.nodes[entry[0]].op.endswith("zeros")]
            return [entries[0], *states], entries[1:2]
        is_layer = rule in LAYERS or node.attrs.get("sample_type") == "bilinear"
        if rule in FUNCTIONAL and not all(map(self._is_parameter, entries[1:])):
            is_layer = False
        return (entries[:1], entries[1:]) if is_layer else (entries, [])

    def _is_parameter(self, entry: Entry) -> bool:
        """Whether an entry can be the parameter of a layer: it is neither computed nor a constant."""
        return self.nodes[entry[0]].op == "null" and entry in self.constants and not self._is_constant(entry)

    def _is_constant(self, entry: Entry) -> bool:
        return self.nodes[entry[0]].name in self.network.constants

    def _source(self, entry: Entry) -> Entry:
        """The entry that has the same value before operators that only copy it."""
        while (rule := find_rule(self.nodes[entry[0]].op)) == "{0}" or rule in RESHAPES:
            i, output = self.nodes[entry[0]].inputs[0]
            if any(shapes[i][output] != shapes[entry[0]][entry[1]] for shapes in self.shapes):
                break
            entry = i, output
        return entry

    def _needed(self, heads: list[Entry]) -> list[int]:
        """The nodes that the outputs need, in order."""
        nodes, used = list[int](), {*heads}
        for i in reversed(range(len(self.nodes))):
            needed = any((i, output) in used for output in range(len(self.shapes[0][i])))
            if needed and self.nodes[i].op != "null" and (i, 0) not in self.constants:
                nodes.insert(0, i)
                used.update(self._operands(i)[0])
        return nodes

    def convert(self) -> Class:
        """The network's steps. Raises Refused."""
        heads = [*map(self._source, self.network.graph.heads)]
        needed, steps, problems = self._needed(heads), list[Statement](), list[tuple[str, str, Unsupported]]()
        refused, before = set[int](), list[str]()  # refused: operators that cannot be converted, and what follows them
        owners = [self._name(i, params) for i in needed if (params := self._operands(i)[1])]
        prefix = "".join(letters[0] for letters in takewhile(lambda letters: len({*letters}) == 1, zip(*owners)))
        self.prefix = prefix[: prefix.rfind("_") + 1]
        for i in needed:
            operands, params = self._operands(i)
            try:
                node = self._node(i, operands, params)
                code = node.code(*(f"_{k}_" for k in range(len(operands))))
            except Unsupported as why:
                problems.append((self.nodes[i].op, self.nodes[i].name, why))
                before += self.network.before(i) if refused.isdisjoint(k for k, _ in operands) else []
                refused.add(i)
                continue
            if not refused.isdisjoint(k for k, _ in operands):
                refused.add(i)
            parts = [self._parameter(entry) if entry in self.constants else entry for entry in operands]
            outputs = [(i, output) for output in range(len(node.outputs))]
            steps.append(Statement(self._name(i), code, parts, outputs, self._layer(i, node, params), node.nested))
        if problems:
            raise Refused(problems, list(dict.fromkeys(before)))
        places = {node.name: (i, 0) for i, node in enumerate(self.nodes) if node.name in self.network.inputs}
        used = {*WORDS}
        inputs = {places[name]: identifier(name, used) for name in self.network.inputs}
        inputs = dict.fromkeys(inputs, "x") if len(inputs) == 1 else inputs
        results = [self._parameter(entry) if entry in self.constants else entry for entry in heads]
        net = Class("Net", (), inputs, steps, results)
        _use_batch_first(net)
        return net

    def _node(self, i: int, operands: list[Entry], params: list[Entry]) -> Node:
        node = self.nodes[i]
        if not all(entry in self.constants for entry in params):
            raise Unsupported("its parameters are computed")
        inputs = [[shapes[j][output] for shapes in self.shapes] for j, output in operands]
        outputs = [list(shapes) for shapes in zip(*(shapes[i] for shapes in self.shapes))]
        return Node(node.op, node.attrs, inputs, outputs, [self._value(entry) for entry in params])

    def _name(self, i: int, params: Sequence[Entry] = ()) -> str:
        """The name of a layer without the network's name: of its parameters, unless they are computed or have another
        owner, or of the Gluon block, such as conv0 for conv0_fwd and lstm0_i2h for lstm0_t5_i2h."""
        name = re.sub(r"(^|_)t\d+(?=_)|_(fwd|(group|layer)norm0|rnn0)$", "", self.nodes[i].name)
        if params and self.nodes[params[0][0]].op == "null" and self.constants[params[0]] not in self.owners:
            given = re.match("(.+)_(weight|gamma|alpha|parameters)$", self.nodes[params[0][0]].name)
            name = given[1] if given else name
        return name.removeprefix(self.prefix)

    def _layer(self, i: int, node: Node, params: list[Entry]) -> Layer | None:
        if not node.layer:
            return None
        descriptions = [self.constants[entry] for entry in params]
        key = node.op, str(node.attrs), *descriptions, node.rank
        if key in self.layers:
            return self.layers[key]
        names = [*node.state]
        frozen = [name for name, entry in zip(names, params) if not self._trains(entry) and "running" not in name]
        if find_rule(node.op) is rnn:
            frozen = [] if self._trains(params[0]) or params[0][0] in self.packed else names
            self._name_parts(params[0], [*node.state.values()])
        name = identifier(self._name(i, params), self.taken)
        layer = self.layers[key] = Layer(name, node.layer, {}, frozen=tuple(frozen), evaluated=node.evaluated)
        for k, (name, array) in enumerate(node.state.items()):
            same = len(params) == len(node.state)  # an RNN has one array for all of its parameters
            description = descriptions[k] if same else f"{descriptions[0]}[{k}]"
            if description in self.owners:
                owner = self.owners[description]
                owner.layer.alone = layer.alone = False
                layer.shared.append((name, owner))
            else:
                self.owners[description], layer.state[name] = Parameter(layer, name), array
        return layer

    def _name_parts(self, packed: Entry, parts: list[np.ndarray]) -> None:
        """Add the names of the arrays that a recurrent layer unpacks, such as rnn_parameters[0:64]."""
        sources = list[tuple[str, int]]()
        pending = [packed[0]]
        while pending:
            i = pending.pop()
            if self.nodes[i].op == "null":
                sources.append((self.nodes[i].name, self.network.params[self.nodes[i].name].size))
            pending += [j for j, _ in reversed(self.nodes[i].inputs)]
        end = 0
        for name, size in sources:
            end, first, at = end + size, end, 0
            for part in parts:
                if first <= at and at + part.size <= end:
                    place = f"[{at - first}:{at - first + part.size}]" if part.size < size else ""
                    self.names[id(part)] = name + place
                at += part.size

    def _parameter(self, entry: Entry) -> Parameter:
        """A parameter or a constant that is not a layer's."""
        description, array, trained = self.constants[entry], self._value(entry), self._trains(entry)
        # What does not train is a buffer, unless a layer has it
        owner = description if trained or description in self.owners else f"buffer {description}"
        if owner not in self.owners:
            dtype = "" if array.dtype == np.float32 else f", dtype=torch.{array.dtype}"
            zeros = f"torch.zeros({array.shape}{dtype})"
            name = identifier(self._name(entry[0]), self.taken)
            code = f"nn.Parameter({zeros})" if trained else zeros
            self.owners[owner] = Parameter(Layer(name, code, {"": array}, buffer=not trained), "")
        parameter = self.owners[owner]
        parameter.layer.alone &= not parameter.name
        return parameter


def _use_batch_first(code: Class) -> None:
    """Let recurrent layers swap axes 0 and 1, if steps before and after them do it."""
    swap, uses = "_0_.transpose(0, 1)", code.uses()
    makers: dict[Operand, Statement] = {entry: step for step in code.steps for entry in step.outputs}
    for at, step in enumerate(code.steps):
        before, users = makers.get(step.operands[0]), uses.get(step.outputs[0], [])
        after = code.steps[users[0]] if len(users) == 1 and users[0] < len(code.steps) else None
        if not (step.nested and step.layer and before and after) or uses[step.operands[0]] != [at]:
            continue
        if before.code == after.code == swap and sum(other.layer is step.layer for other in code.steps) == 1:
            step.layer.code = f"{step.layer.code[:-1]}, batch_first=True)"
            step.operands[0], step.outputs[0] = before.operands[0], after.outputs[0]
            before.code = after.code = ""
    code.steps = [step for step in code.steps if step.code]


def _called(text: str) -> list[str]:
    """The code of the functions that some code calls."""
    called = dict[str, str]()
    for name in reversed(FUNCTIONS):  # a function calls only those before it
        if re.search(rf"\b{name}\(", text):
            called[name] = ast.unparse(FUNCTIONS[name])
            text += called[name]
    return list(called.values())[::-1]


class _Writer:
    """Writes the lines of a method forward. words: names that its variables cannot have."""

    def __init__(self, code: Class, words: set[str]) -> None:
        self.code, self.words, self.uses = code, words, code.uses()
        self.variables: dict[Entry, str] = dict(code.inputs)
        self.lists: dict[tuple[Operand, ...], str] = {}  # variables that are lists of values
        self.lines = list[str]()
        self.taken: set[str] = set()  # variables whose values are needed later
        loops = [step for step in code.steps if isinstance(step, Loop)]
        self.elements = {given.operands for loop in loops for given in loop.inputs if isinstance(given, Elements)}
        self.elements |= {operands[::-1] for operands in self.elements}

    def read(self, operand: Operand) -> str:
        if isinstance(operand, Parameter):
            return f"self.{join(operand.layer.name, operand.name)}"
        return self.variables[operand]

    def read_list(self, operands: tuple[Operand, ...]) -> str:
        """The code of a list of values: if possible, a variable, or a part of it."""
        for entries, name in self.lists.items():
            if operands == entries:
                return name
            if operands == entries[::-1]:
                return f"{name}[::-1]"
            if operands == entries[1:]:
                return f"{name}[1:]"
            if operands == entries[:-1]:
                return f"{name}[:-1]"
        return f"[{', '.join(map(self.read, operands))}]"

    def new(self, name: str, number: int | str = "") -> str:
        """A new variable. name: of a step, whose last number counts from the first step of some network."""
        name = re.sub(r"_*\d+$", "", name) or "y"
        separator = "_" if number != "" else ""
        for suffix in chain([""], (f"{separator}{k}" for k in count(2))):
            variable = identifier(f"{name}{number}{suffix}", set())
            if variable not in self.taken | self.words:
                break
        return variable

    def write(self) -> list[str]:
        last: tuple[Operand | None, str, str] = None, "", ""  # the last line's value, its code, its layer's name
        lines, uses, variables = self.lines, self.uses, self.variables
        for at, step in enumerate(self.code.steps):
            live = [entry for entry in variables if uses.get(entry, [-1])[-1] >= at]
            if len(lines) > 1 and [len(uses[entry]) > 1 for entry in live] == [True]:
                lines.append("")  # between blocks of the network
            self.taken = {variables[entry].partition("[")[0] for entry in live if uses[entry][-1] > at}
            if isinstance(step, Loop):
                self.write_loop(step, at)
                last = None, "", ""
                continue
            operands, name = [*map(self.read, step.operands)], step.layer.name if step.layer else ""
            if step.operands[:1] == [last[0]] and uses[step.operands[0]] == [at] and _continues(step, last[1]):
                lines.pop()
                operands[0], name = last[1], name or last[2]
            text = self.text(step, operands)
            targets = self.targets(step, at, name or step.name)
            if step.repeated:
                lines += [f"{targets[0]} = {operands[0]}"] * (targets[0] != operands[0])
                call = f"block({', '.join([targets[0], *operands[1:]])})"
                lines += [f"for block in self.{name}:", f"    {targets[0]} = {call}"]
            else:
                lines.append(f"{', '.join(targets)} = {text}")
            single = len(step.outputs) == 1 and not step.repeated and not step.nested
            last = (step.outputs[0], text, name) if single else (None, "", "")
        result = ", ".join(map(self.read, self.code.results))
        if [*self.code.results] == [last[0]]:
            lines.pop()
            result = last[1]
        return [*lines, f"return {result}"]

    def text(self, step: Statement, operands: list[str]) -> str:
        """The code of a step with the code of its operands."""
        code = re.sub(r"\bself\.layer\b", f"self.{step.layer.name}", step.code) if step.layer else step.code
        for found in re.finditer(r"\[_\d+_(, _\d+_)+\]", code):
            places = [*map(int, re.findall(r"_(\d+)_", found[0]))]
            entries = tuple(step.operands[place] for place in places if place < len(step.operands))
            if len(entries) == len(places) and not (name := self.read_list(entries)).startswith("["):
                code = code.replace(found[0], name)
        return "".join(operands[int(part)] if k % 2 else part for k, part in enumerate(re.split(r"\b_(\d+)_\b", code)))

    def targets(self, step: Statement, at: int, name: str) -> list[str]:
        """The variables to which a step assigns."""
        kept = [entry for entry in step.outputs if entry in self.uses]
        if len(kept) > MOST_TARGETS or tuple(step.outputs) in self.elements:
            variable = self.new(name)
            self.lists[tuple(step.outputs)] = variable
            self.variables.update((entry, f"{variable}[{k}]") for k, entry in enumerate(step.outputs))
            return [variable]
        for entry in kept:
            if len(kept) == 1 and {*self.uses[entry]} == {at + 1}:
                self.variables[entry] = next(name for name in "xyz" if name not in self.taken)
            else:
                number = entry[1] if len(kept) > 1 else ""
                self.variables[entry] = self.new(name, number)
                self.taken.add(self.variables[entry])
        targets = [self.variables[entry] if entry in self.uses else "_" for entry in step.outputs]
        if step.nested:  # (output, state), where the state of an LSTM is a tuple
            states = targets[1:] if {*targets[1:]} - {"_"} else ["_"]
            targets[1:] = [f"({', '.join(states)})" if len(states) > 1 else states[0]]
        return targets

    def write_loop(self, loop: Loop, at: int) -> None:
        """Write a loop over time steps, or a list comprehension."""
        self.taken |= {self.read(x).partition("[")[0] for x in loop.operands if not isinstance(x, Parameter)}
        names, lists, states = list[str](), dict[str, str](), dict[str, str]()
        results: dict[int, str] = {}  # the variable for each output in the loop
        for given in loop.inputs:
            if isinstance(given, Carried):
                name = self.new("state")
                states[name] = self.read(given.first)
                results[given.output] = name
            elif isinstance(given, Elements):
                name = self.new("step")
                lists[name] = self.read_list(given.operands)
            else:
                name = self.read(given)
            names.append(name)
            self.taken.add(name)
        collected: dict[int, str] = {}
        for k, entries in enumerate(loop.results):
            results.setdefault(k, self.new("y"))
            self.taken.add(results[k])
            if any(self.uses.get(entry, [-1])[-1] > at for entry in entries[:-1]):
                collected[k] = self.new(f"{loop.name}_outputs")
                self.taken.add(collected[k])
                self.lists[entries] = collected[k]
        if loop.layer:
            call = Statement(loop.name, loop.code, [], [], loop.layer)
            body = [f"{', '.join(results[k] for k in range(len(results)))} = {self.text(call, names)}"]
        else:
            body = self.body(loop, names, results)
        over = f"{', '.join(lists)} in " + (
            f"zip({', '.join(lists.values())})" if len(lists) > 1 else "".join(lists.values())
        )
        over = over if lists else f"_ in range({loop.count})"
        if not states and len(body) == len(results) == len(collected) == 1:
            self.lines.append(f"{collected[0]} = [{body[0].partition(' = ')[2]} for {over}]")
        else:
            if states:
                self.lines.append(f"{', '.join(states)} = {', '.join(states.values())}")
            self.lines += [f"{name} = []" for name in collected.values()]
            self.lines += [f"for {over}:", *textwrap.indent("\n".join(body), "    ").split("\n")]
            self.lines += [f"    {name}.append({results[k]})" for k, name in collected.items()]
        for k, entries in enumerate(loop.results):
            if k in collected:
                self.variables.update((entry, f"{collected[k]}[{t}]") for t, entry in enumerate(entries))
            if k not in collected or k in {given.output for given in loop.inputs if isinstance(given, Carried)}:
                self.variables[entries[-1]] = results[k]

    def body(self, loop: Loop, names: list[str], results: dict[int, str]) -> list[str]:
        """The lines of a loop that calls no class."""
        inputs = dict(zip(loop.places, names))
        outputs: list[Operand] = [entries[0] for entries in loop.results]
        writer = _Writer(Class("", (), inputs, loop.body, outputs), self.words | self.taken)
        *lines, last = writer.write()
        targets = ", ".join(results[k] for k in range(len(results)))
        return [*lines, f"{targets} = {last.removeprefix('return ')}"]


def _continues(step: Statement, before: str) -> bool:
    """Whether a step can be written on the line before, because it calls a method or a function of its value."""
    if step.code.count("_0_") > 1:
        return False
    if step.code.startswith("_0_"):
        return len(before) < 90 and isinstance(ast.parse(before, mode="eval").body, (ast.Call, ast.Subscript))
    simple = re.match(r"[\w.]+\(_0_[,)]", step.code) and before.count("(") < 3 and len(before + step.code) < 90
    return bool(simple) and (not step.layer or bool(re.match(r"nn\.\w+Norm", step.layer.code)))


class _Calls(ast.NodeTransformer):
    """Leaves out arguments that are a class's defaults, and names the others but the first two."""

    def __init__(self, classes: list[Class]) -> None:
        self.classes = {code.name: code for code in classes}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and (code := self.classes.get(node.func.id)):
            named = [*zip(code.words, node.args)][2:]
            node.keywords += [
                ast.keyword(word, value) for word, value in named if ast.unparse(value) != code.defaults.get(word)
            ]
            node.args = node.args[:2]
        return node


def _methods(code: Class, words: set[str], classes: list[Class]) -> str:
    """The code of a class's methods. classes: those that it may use."""
    layers, evaluated = list[str](), list[str]()
    for layer in layers_of(code.steps):
        create = ast.unparse(_Calls(classes).visit(ast.parse(DEFAULT.sub("", layer.code), mode="eval")))
        line = f"self.{layer.name} = {create}{'.eval()' * layer.evaluated}"
        layers.append(f'self.register_buffer("{layer.name}", {create})' if layer.buffer else line)
        if layer.evaluated:
            evaluated.append(f"self.{layer.name}.eval()")
        whole = len(layer.frozen) > 1 and {*layer.state} - {"running_mean", "running_var"} <= {*layer.frozen}
        for name in ["", *layer.frozen][not whole : 1 if whole else None]:
            layers.append(f"self.{join(layer.name, name)}.requires_grad_(False)  # as in MXNet")
        for name, owner in layer.shared:
            layers.append(
                f"# Shared, as in MXNet\nself.{layer.name}.{name} = self.{join(owner.layer.name, owner.name)}"
            )
    lines = _Writer(code, words).write()
    arguments = [word for word in code.words if word not in code.defaults]
    arguments += [f"{word}={value}" for word, value in code.defaults.items()]
    methods = INIT.format(arguments=", ".join(["self", *arguments]), layers=_indent(layers)) if layers else ""
    methods += TRAIN.format(layers=_indent(evaluated)) if evaluated else ""
    return (methods + FORWARD.format(arguments=", ".join(["self", *code.inputs.values()]), lines=_indent(lines))).strip(
        "\n"
    )


def _indent(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), " " * 8)


def _write_formatted(file: Path, code: str) -> None:
    """Write code that ruff has formatted."""
    compile(code, file.name, "exec")  # raises SyntaxError
    file.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={LINE_LENGTH}", str(file)]
    subprocesses.raise_for_status("ruff", subprocesses.run(command))


def write(network: Exported, base: str) -> None:
    """Write BASE.py and BASE.safetensors, whose metadata has MXNet's names. BASE's last part must be an identifier.

    Raises Refused if operators cannot be converted.
    """
    from safetensors.numpy import save_file

    converter = _Converter(network)
    net = converter.convert()
    taken = {"Net", *WORDS}
    classes = roll(net, taken) + find(net, taken)
    used, layers = {*TAKEN}, layers_of(net.steps)
    for layer in layers:
        layer.name = identifier(layer.name, used)
    inputs = [f"{identifier(name, set())} ({', '.join(map(str, network.axes(name)))})" for name in network.inputs]
    outputs = ", ".join(identifier(name, set()) for name in network.outputs)
    docstring = textwrap.wrap(f"Inputs: {', '.join(inputs)}. Outputs: {outputs}.", LINE_LENGTH - 10)
    words = {*WORDS, *(block.name for block in classes)}
    blocks = [f"class {block.name}(nn.Module):\n{_methods(block, words, classes)}" for block in classes]
    methods = _methods(net, words, classes)
    definitions = [*_called("\n".join([*blocks, methods])), *blocks]
    code = MODULE.format(
        version=__version__,
        name=os.path.basename(base),
        definitions="".join(f"\n\n{definition}\n" for definition in definitions),
        docstring="\n    ".join(docstring) + "\n    " * (len(docstring) > 1),
        net=methods,
    )
    _write_formatted(Path(f"{base}.py"), code)
    state = {join(layer.name, key): array for layer in layers for key, array in layer.state.items()}
    metadata = {key: converter.names[id(array)] for key, array in state.items() if id(array) in converter.names}
    save_file(state, f"{base}.safetensors", metadata or None)  # it cannot read an empty one


def run(network: Exported, base: str, *tasks: str) -> None:
    """Run tasks of pytorch_process.py, which load the written files."""
    inputs = {f"{i} {k}": X for i, sample in enumerate(network.samples) for k, X in enumerate(sample.inputs)}
    np.savez(f"{base}.inputs.npz", **inputs)
    program = str(Path(__file__).with_name("pytorch_process.py"))
    command = subprocesses.python(f"import runpy; runpy.run_path({program!r}, run_name='__main__')")
    subprocesses.raise_for_status("PyTorch", subprocesses.run([*command, base, *tasks]))


def outputs(network: Exported, base: str) -> list[list[np.ndarray]]:
    """Load the written files in a new process, and compute the outputs for each of the network's samples."""
    gradients.write_reference(network, base)
    run(network, base, "outputs", "gradients")
    with np.load(f"{base}.outputs.npz") as arrays:
        return [[arrays[f"{i} {k}"] for k in range(len(sample.outputs))] for i, sample in enumerate(network.samples)]


def differences(network: Exported, base: str, tolerance: float) -> gradients.Differences:
    """How the written module trains differently. `outputs` has run before."""
    if gradients.failed(base):  # such as an operator that PyTorch computes only in float32
        gradients.write_reference(network, base, ["float32"])
        run(network, base, "gradients")
    return gradients.differences(network, base, tolerance)
