"""Converts the graph of a network to statements of PyTorch, node by node."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from gluon_mgpu.convert.exported import Exported, Shape, Unsupported
from gluon_mgpu.convert.graph import Entry
from gluon_mgpu.convert.operators import FUNCTIONAL, LAYERS, RESHAPES, Node, find_rule, reshape, rnn
from gluon_mgpu.convert.simplify import simplify
from gluon_mgpu.convert.statements import TAKEN, Class, Layer, Operand, Parameter, Statement, identifier
from gluon_mgpu.convert.writer import WORDS
from gluon_mgpu.support.errors import UsageError

# Operators without inputs, such as _zeros and _npi_zeros
SOURCES = "arange eye full identity indices linspace logspace ones zeros".split()
NEARLY_ALL = 0.95  # layers whose names begin with the name of their network


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


def _shared_prefix(names: Sequence[str]) -> str:
    """The beginning, up to a "_", that nearly all of the layers' names have."""
    prefix = ""
    while True:
        longer = Counter(name[: name.find("_", len(prefix)) + 1] for name in names if name.startswith(prefix))
        best, count = longer.most_common(1)[0] if longer else ("", 0)
        if len(best) <= len(prefix) or count < NEARLY_ALL * len(names):
            return prefix
        prefix = best


class Converter:
    """Converts a graph to steps, node by node."""

    def __init__(self, network: Exported) -> None:
        self.network, self.nodes = network, network.graph.nodes
        sizes = dict.fromkeys(tuple(X.shape for X in sample.inputs) for sample in network.samples)
        self.shapes = list(map(network.shapes, sizes))  # for each sample, then for each node and output
        self.users: dict[int, set[int]] = {}
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
                constant, description = fixed, f"{node.op} {i}"
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

    def _variable(self, entry: Entry) -> str:
        """The name of an input or a parameter, or "" for what an operator computes."""
        node = self.nodes[entry[0]]
        return node.name if node.op == "null" else ""

    def _trains(self, entry: Entry) -> bool:
        """Whether an entry is a parameter that MXNet trains."""
        return self._variable(entry) in self.network.trained

    def _value(self, entry: Entry) -> np.ndarray:
        """Compute a constant."""
        if name := self._variable(entry):
            return self.network.params[name]
        inputs = [i for i, node in enumerate(self.nodes) if node.name in self.network.inputs]
        heads = [entry, *((i, 0) for i in inputs)]  # MXNet cannot compute a graph without any input
        return self.network.evaluate(self.network.graph.symbol(heads), [self.network.samples[0].inputs])[0][0]

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
        return self._variable(entry) in self.network.params.keys() - self.network.constants

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
        needed, steps, problems = self._needed(heads), list[Statement](), dict[int, Unsupported]()
        owners = [self._name(i, params) for i in needed if (params := self._operands(i)[1])]
        self.prefix = _shared_prefix(owners)
        for i in needed:
            operands, params = self._operands(i)
            try:
                node = self._node(i, operands, params)
                code = node.code(*(f"_{k}_" for k in range(len(operands))))
            except Unsupported as why:
                problems[i] = why
                continue
            parts = [self._parameter(entry) if entry in self.constants else entry for entry in operands]
            outputs = [(i, output) for output in range(len(node.outputs))]
            steps.append(Statement(self._name(i), code, parts, outputs, self._layer(i, node, params), node.nested))
        if problems:
            raise self._refused(problems, needed)
        places = {node.name: (i, 0) for i, node in enumerate(self.nodes) if node.name in self.network.inputs}
        used = {*WORDS}
        inputs = {places[name]: identifier(name, used) for name in self.network.inputs}
        inputs = dict.fromkeys(inputs, "x") if len(inputs) == 1 else inputs
        results = [self._parameter(entry) if entry in self.constants else entry for entry in heads]
        net = Class("Net", (), inputs, steps, results)
        simplify(net, self._shapes_of)
        return net

    def _shapes_of(self, entry: Operand) -> list[Shape]:
        """The shape of what a node computes, for each sample."""
        assert not isinstance(entry, Parameter)
        i, output = entry
        return [shapes[i][output] for shapes in self.shapes]

    def _refused(self, problems: dict[int, Unsupported], needed: list[int]) -> Refused:
        """The error for a graph. What can be converted for inputs of one size is no problem if something else is."""
        lasting = {i: why for i, why in problems.items() if not why.fixed_size} or problems
        reached, before = set[int](), dict[str, None]()  # reached: these operators, and what follows them
        for i in needed:
            follows = not reached.isdisjoint(j for j, _ in self._operands(i)[0])
            if i in lasting and not follows:
                before.update(dict.fromkeys(self.network.before(i)))
            if i in lasting or follows:
                reached.add(i)
        return Refused([(self.nodes[i].op, self.nodes[i].name, why) for i, why in lasting.items()], [*before])

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
        if params and self._variable(params[0]) and self.constants[params[0]] not in self.owners:
            given = re.match("(.+)_(weight|gamma|alpha|parameters)$", self._variable(params[0]))
            name = given[1] if given else name
        return name[os.path.commonprefix([name, self.prefix]).rfind("_") + 1 :]

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
            if name := self._variable((i, 0)):
                sources.append((name, self.network.params[name].size))
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
