"""The graph of a network: reads it from a file, cuts it at outputs, and replaces nodes.

Nodes are identified by their index, because several can have the same name: a block that is called twice writes two
nodes with its name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mxnet as mx

from gluon_mgpu.convert.registry import TRUE, attributes, is_known, parse, simple
from gluon_mgpu.support.errors import UsageError

# What computes the outputs of layers that are used in training, and whose second input is the labels
OUTPUTS = {
    "LogisticRegressionOutput": "sigmoid",
    **dict.fromkeys(("LinearRegressionOutput", "MAERegressionOutput", "SVMOutput"), "_copy"),
    **dict.fromkeys(("MakeLoss", "make_loss", "IdentityAttachKLSparseReg"), "_copy"),  # only their gradients differ
}

Entry = tuple[int, int]  # one output of a node: the node's index, and the index of the output


@dataclass
class GraphNode:
    """An operator, or an input or a parameter, whose op is "null"."""

    op: str
    name: str
    attrs: dict[str, str]
    inputs: list[Entry]
    subgraphs: list[Any] = field(default_factory=list)  # of loops and branches

    @property
    def kind(self) -> str:
        return simple(self.op)

    def value(self, key: str) -> Any:
        """An attribute's value, or MXNet's default. Raises KeyError, SyntaxError or ValueError."""
        kind, default = attributes(self.op)[key]
        return parse(kind, self.attrs.get(key, default))

    def is_true(self, key: str, default: str = "False") -> bool:
        return self.attrs.get(key, default) in TRUE

    @property
    def is_quantized(self) -> bool:
        return "quantize" in self.op or self.op.startswith("_sg_mkldnn")

    @property
    def has_lengths(self) -> bool:
        """Whether it is a recurrent layer with the lengths of its sequences, which MXNet ignores on CPUs."""
        return self.op == "RNN" and self.is_true("use_sequence_length")

    def output_names(self) -> list[str]:
        """The names of its outputs, or one name if MXNet does not know the operator."""
        if self.op == "null":
            return [self.name]
        if self.is_quantized:  # with the smallest and the largest number
            return [f"{self.name}_output", f"{self.name}_min", f"{self.name}_max"]
        sources = [GraphNode("null", f"input {i}", {}, []) for i in range(len(self.inputs))]
        try:
            known = attributes(self.op)
            attrs = {key: value for key, value in self.attrs.items() if key in known}
            alone = replace(self, attrs=attrs, inputs=[(i, 0) for i in range(len(sources))])
            names = Graph([*sources, alone], [(len(sources), 0)]).symbol().get_internals().list_outputs()
            return [name for name in names if not name.startswith("input ")]
        except mx.MXNetError:
            return [f"{self.name}_output"]


Rule = Callable[[int, GraphNode, Callable[[GraphNode], Entry]], object]


@dataclass
class Graph:
    """The operators of a network, each one after its inputs."""

    nodes: list[GraphNode]
    heads: list[Entry]  # the outputs
    attrs: dict[str, Any] = field(default_factory=lambda: {"mxnet_version": ["int", 10901]})

    @classmethod
    def of(cls, symbol: mx.sym.Symbol, **attrs: Any) -> Graph:
        graph = json.loads(symbol.tojson())
        nodes = [
            GraphNode(
                *(node["op"], node["name"], node.get("attrs", {}), _entries(node["inputs"])),
                node.get("subgraphs", []),
            )
            for node in graph["nodes"]
        ]
        return cls(nodes, _entries(graph["heads"]), {**graph["attrs"], **attrs})

    def symbol(self, heads: Sequence[Entry] | None = None) -> mx.sym.Symbol:
        """MXNet's symbol with these outputs. Raises MXNetError."""
        nodes = [
            {"op": node.op, "name": node.name, "attrs": node.attrs, "inputs": [[*entry, 0] for entry in node.inputs]}
            | ({"subgraphs": node.subgraphs} if node.subgraphs else {})
            for node in self.nodes
        ]
        graph = {
            "nodes": nodes,
            "arg_nodes": [i for i, node in enumerate(self.nodes) if node.op == "null"],
            "heads": [[*entry, 0] for entry in (self.heads if heads is None else heads)],
            "attrs": self.attrs,
        }
        return mx.sym.load_json(json.dumps(graph, ensure_ascii=False))  # MXNet cannot read \\u00e9

    @property
    def is_np_shape(self) -> bool:
        """Whether a shape of () means a scalar: the network was exported under npx.set_np()."""
        return bool(self.attrs.get("is_np_shape", ["int", 0])[1])

    def loaded(self) -> Graph:
        """The graph as MXNet loads it: without nodes that no output needs, and with today's attributes.

        Raises MXNetError.
        """
        return Graph.of(self.symbol(), is_np_shape=["int", int(self.is_np_shape)])

    def rewritten(self, rule: Rule) -> Graph:
        """The graph with other nodes.

        rule(i, node, add) gets a node and its index, and adds those that replace it. The last one has its outputs. If
        it adds none, the node stays. The inputs of `node` and of added nodes are those of the new graph.
        """
        nodes, moved = list[GraphNode](), list[int]()  # moved: the new index of each node

        def add(node: GraphNode) -> Entry:
            nodes.append(node)
            return len(nodes) - 1, 0

        for i, node in enumerate(self.nodes):
            count, node = len(nodes), replace(node, inputs=[(moved[j], k) for j, k in node.inputs])
            rule(i, node, add)
            if len(nodes) == count:
                nodes.append(node)
            moved.append(len(nodes) - 1)
        return replace(self, nodes=nodes, heads=[(moved[i], k) for i, k in self.heads])

    def ending_with(self, outputs: Sequence[str]) -> Graph:
        """The part that computes these outputs, which are names of outputs or of layers; or all outputs, if there are
        none.

        Raises UsageError if there is no such output, or if MXNet does not know an operator of this part.
        """
        heads, names = list[Entry](), [node.output_names() for node in self.nodes]
        places = {name: (i, k) for i, others in enumerate(names) for k, name in enumerate(others)}
        for name in outputs:
            found = [places[other] for other in (name, f"{name}_output", f"{name}_output0") if other in places]
            if not found:
                near = ", ".join(dict.fromkeys([*difflib.get_close_matches(name, places, 3, 0), names[-1][-1]]))
                raise UsageError("output", name, f"no layer has this output; existing outputs include {near}")
            heads.append(max(found))
        heads = heads or self.heads
        needed = {i for i, _ in heads}
        for i in reversed(range(len(self.nodes))):
            if i in needed:
                needed.update(j for j, _ in self.nodes[i].inputs)
        moved = {i: k for k, i in enumerate(sorted(needed))}
        for node in map(self.nodes.__getitem__, moved):
            layer = f"{node.op!r} layer {node.name!r}"
            if node.op != "null" and not is_known(node.op):
                advice = f"is not in MXNet {mx.__version__}; --output NAME converts the part before it"
                raise UsageError(None, layer, advice)
            if node.is_quantized:
                raise UsageError(None, layer, "is quantized; convert the network from which it was quantized")
        nodes = [replace(self.nodes[i], inputs=[(moved[j], k) for j, k in self.nodes[i].inputs]) for i in moved]
        return replace(self, nodes=nodes, heads=[(moved[i], k) for i, k in heads])


def _entries(given: Sequence[Sequence[int]]) -> list[Entry]:
    return [(i, k) for i, k, *_ in given]


def read(file: str | Path) -> Graph:
    """The graph of a file.

    MXNet crashes if an index is wrong, or if nodes are not in order. Raises ValueError or another error of Python then.
    """
    return _checked(json.loads(Path(file).read_text(encoding="utf-8")))


def _checked(graph: dict[str, Any]) -> Graph:
    nodes, counts = list[GraphNode](), list[int]()  # counts: of each node's outputs

    def entries(given: Sequence[Sequence[int]]) -> list[Entry]:
        found = _entries(given)
        for i, k in found:
            if not (type(i) is type(k) is int and 0 <= i < len(nodes) and 0 <= k < counts[i]):
                raise ValueError("it refers to a layer or an output that does not exist, or that comes later")
        return found

    for node in graph["nodes"]:
        attrs = {**node.get("param", {}), **node.get("attr", {}), **node.get("attrs", {})}
        if not all(isinstance(text, str) for text in (node["op"], node["name"], *attrs, *attrs.values())):
            raise ValueError("a name or an attribute is not text")
        subgraphs = [subgraph for subgraph in node.get("subgraphs", []) if _checked(subgraph)]
        nodes.append(GraphNode(node["op"], node["name"], attrs, entries(node["inputs"]), subgraphs))
        counts.append(len(nodes[-1].output_names()))
    if not graph["heads"]:
        raise ValueError("it has no outputs")
    return Graph(nodes, entries(graph["heads"]), dict(graph.get("attrs", {})))


def without_losses(i: int, node: GraphNode, add: Callable[[GraphNode], Entry]) -> None:
    """A rule that replaces operators of training, so that labels are no longer inputs, and those of sparse arrays."""
    name, given = node.name, node.inputs[:1]
    if node.op == "SoftmaxOutput":
        if node.is_true("multi_output") or node.is_true("preserve_shape"):
            axis = "-1" if node.is_true("preserve_shape") else "1"
            add(GraphNode("softmax", name, {"axis": axis}, given))
        else:  # over all classes of an example
            rows = add(GraphNode("Flatten", f"{name}_flatten", {}, given))
            y = add(GraphNode("softmax", f"{name}_softmax", {}, [rows]))
            add(GraphNode("reshape_like", name, {}, [y, *given]))
    elif node.op in OUTPUTS:
        add(GraphNode(OUTPUTS[node.op], name, {}, given))
    elif node.op == "_square_sum":
        add(GraphNode("sum", name, node.attrs, [add(GraphNode("square", f"{name}_square", {}, given))]))
    elif node.op == "_contrib_SparseEmbedding":
        add(replace(node, op="Embedding"))


def in_float64(i: int, node: GraphNode, add: Callable[[GraphNode], Entry]) -> None:
    """A rule that replaces float32 by float64."""
    default = "" if node.op == "null" else attributes(node.op).get("dtype", ("", ""))[1]
    if node.attrs.get("dtype", default) == "float32":
        add(replace(node, attrs={**node.attrs, "dtype": "float64"}))
