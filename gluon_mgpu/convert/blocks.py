"""Finds blocks in the code of a network: groups of steps that occur several times, and become one class.

A group is found where branches leave a value and meet again, as in a residual block, and where layers have a common
name such as transformer0. Its occurrences have the same operators, connected in the same way. The numbers that create
their layers may differ: they become arguments of the class.
"""

from __future__ import annotations

import ast
import keyword
import os
import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, Union

import numpy as np

from gluon_mgpu.convert.graph import Entry

MOST_STEPS, MOST_INPUTS = 400, 4  # of a group
LEAST_UNITS = 3  # that become a class
ACTIVATION = re.compile(r"(torch|F)\.\w*(elu|sigmoid|tanh|swish)\(_0_[^_]*\)$|_0_\.clamp\(")
# Attributes of nn.Module that a layer must not replace
TAKEN = """apply buffers children compile cpu cuda double eval float forward half load_state_dict modules
    parameters state_dict to train training type zero_grad""".split()
# A constant, or a tuple of numbers
NUMBER = re.compile(r"(?<!\w)\((?:-?\d+(?:, )?)+,?\)|(?<![\w.])-?\d[\d.]*(?:e-?\d+)?|\b(?:True|False)\b")
# Names for the numbers that create a layer
WORDS = {"nn.Conv": ("inputs", "channels"), "nn.Linear": ("inputs", "units"), "nn.BatchNorm": ("channels",)}

Span = tuple[int, int]  # of steps: the first one, and the one after the last


@dataclass(eq=False)
class Layer:
    """A layer, a block, a parameter or a buffer."""

    name: str
    code: str  # creates it
    state: dict[str, np.ndarray]  # by PyTorch's names; a parameter and a buffer have the name ""
    words: tuple[str, ...] | None = None  # the arguments of a block or a unit
    buffer: bool = False
    frozen: tuple[str, ...] = ()  # its parameters that do not train
    evaluated: bool = False  # it is always in evaluation mode
    shared: list[tuple[str, Parameter]] = field(default_factory=list)  # its parameters that belong to other layers
    alone: bool = True  # it shares no parameters
    is_unit: bool = False  # a convolution with what follows it

    @property
    def is_block(self) -> bool:
        return self.words is not None and not self.is_unit


class Parameter(NamedTuple):
    """A parameter of a layer."""

    layer: Layer
    name: str


Operand = Union[Entry, Parameter]


@dataclass
class Statement:
    """A line of code. In `code`, _0_ is the first operand, and self.layer the layer."""

    name: str
    code: str
    operands: list[Operand]
    outputs: list[Entry]
    layer: Layer | None = None
    nested: bool = False  # the outputs are (output, state)
    repeated: bool = False  # the layer is a list of blocks; each one's first operand is the result of the one before
    is_loop: ClassVar[bool] = False

    def layers(self) -> list[Layer]:
        others = [operand.layer for operand in self.operands if isinstance(operand, Parameter)]
        return [*others, self.layer] if self.layer else others

    def entries(self) -> list[Entry]:
        return [operand for operand in self.operands if not isinstance(operand, Parameter)]


@dataclass
class Class:
    """The code of a block or of the network."""

    name: str
    words: tuple[str, ...]  # the arguments of its constructor
    inputs: dict[Entry, str]
    steps: list[Statement]
    results: list[Operand]
    defaults: dict[str, str] = field(default_factory=dict)  # of its arguments

    def uses(self) -> dict[Operand, list[int]]:
        """For each value, the steps that use it, in order. Results are used after the last step."""
        uses: dict[Operand, list[int]] = {}
        for at, step in enumerate([*self.steps, Statement("", "", self.results, [])]):
            for entry in step.entries():
                uses.setdefault(entry, []).append(at)
        return uses

    def calls(self) -> Counter[Layer]:
        """How often each layer is used."""
        return Counter(layer for step in self.steps for layer in step.layers())


def find(network: Class, taken: set[str]) -> list[Class]:
    """Move blocks of a network into classes, which are returned. taken: names that the classes cannot have."""
    _move_independent(network)
    classes = list[Class]()
    for kind, length in (("ConvNormAct", 3), ("ConvNorm", 2)):
        while spans := _units(network, length):
            paths = [layers_of(network.steps[slice(*span)])[0].name for span in spans]
            classes.append(_outline(network, spans, class_name(kind, taken), paths, ["conv", "norm"]))
    while spans := _best(network):
        spans = _extended(network, spans)
        kind, paths = _block_names(network, spans)
        classes.append(_outline(network, spans, class_name(kind, taken), paths))
    _connect(network)
    return classes


def layers_of(steps: Iterable[Statement]) -> list[Layer]:
    return list(dict.fromkeys(layer for step in steps for layer in step.layers()))


def identifier(name: str, others: set[str]) -> str:
    """Convert a name to an identifier that is not in `others`, and add the identifier to `others`."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_")
    if not name[:1].isalpha():
        name = f"layer{name}"
    while keyword.iskeyword(name) or name in others:
        name += "_"
    others.add(name)
    return name


def class_name(kind: str, taken: set[str]) -> str:
    """A name for a new class: kind, or kind with a number. It is added to `taken`."""
    count = sum(bool(re.fullmatch(rf"{kind}\d*", name)) for name in taken)
    return identifier(f"{kind}{count + 1}" if count else kind, taken)


def form(steps: list[Statement], inputs: Iterable[Entry], results: Iterable[Entry] = ()) -> tuple[Any, ...]:
    """What steps have in common that can be calls of one class: the operators, and how they are connected."""
    places: dict[Any, Any] = {layer: k for k, layer in enumerate(layers_of(steps))}
    places |= {entry: (-1, k) for k, entry in enumerate(inputs)}
    described = list[Any]()
    for at, step in enumerate(steps):
        operands = [places[x.layer] if isinstance(x, Parameter) else places[x] for x in step.operands]
        used = [(places[x], NUMBER.sub("0", x.code), x.evaluated, x.frozen) for x in step.layers()]
        described.append((step.code, *operands, *used))
        places |= {entry: (at, k) for k, entry in enumerate(step.outputs)}
    return (*described, *(places[entry] for entry in results))


def _move_independent(network: Class) -> None:
    """Move steps that depend on no layer, such as the computation of a mask, to the beginning."""
    known, first, rest = {*network.inputs}, list[Statement](), list[Statement]()
    for step in network.steps:
        independent = not step.layers() and known.issuperset(step.entries())
        (first if independent else rest).append(step)
        known.update(step.outputs if independent else ())
    network.steps = first + rest


def _units(network: Class, length: int) -> list[Span]:
    """The spans of the largest group of convolutions with their normalization and, if length is 3, their activation."""
    uses, calls = network.uses(), network.calls()
    groups: dict[Any, list[Span]] = {}
    for start in range(len(network.steps) - length + 1):
        span = start, start + length
        if _is_unit(network.steps[slice(*span)], uses, start) and (found := _form(network, span, calls, length)):
            groups.setdefault(found, []).append(span)
    return max((spans for spans in groups.values() if len(spans) >= LEAST_UNITS), key=len, default=[])


def _is_unit(steps: list[Statement], uses: dict[Operand, list[int]], start: int) -> bool:
    """Whether steps are a convolution, its normalization, and an activation if there are three."""
    first, second, *third = steps
    chained = all(
        len(after.operands) == 1 and after.operands == before.outputs and uses[before.outputs[0]] == [at]
        for at, (before, after) in enumerate(zip(steps, steps[1:]), start + 1)
    )
    plain = "self.layer(_0_)"
    if not chained or not first.layer or not second.layer or not first.code == second.code == plain:
        return False
    layers = re.match(r"nn\.Conv", first.layer.code) and re.match(r"nn\.(Batch|Instance|Group)Norm", second.layer.code)
    return bool(layers) and (not third or bool(third[0].layer is None and ACTIVATION.match(third[0].code)))


def _best(network: Class) -> list[Span]:
    """The spans of the group that occurs most often; of several, the one whose name has the most parts, or else one
    without other blocks, or else the longest."""
    uses, calls = network.uses(), network.calls()
    groups: dict[Any, list[Span]] = {}
    for start, least in sorted({*_starts(network, uses)}):
        end = _end(network, uses, start, least)
        found = end and _form(network, (start, end), calls)
        if end and found and (found not in groups or groups[found][-1][1] <= start):
            groups.setdefault(found, []).append((start, end))

    def priority(spans: list[Span]) -> tuple[int, int, bool, int]:
        layers = layers_of(network.steps[slice(*spans[0])])
        depth = len(re.findall(r"\d(?=_|$)", common_path(layers)))  # 2 for stage1_unit1
        return len(spans), depth, not any(layer.is_block for layer in layers), spans[0][1] - spans[0][0]

    return max((spans for spans in groups.values() if len(spans) > 1), key=priority, default=[])


def _starts(network: Class, uses: dict[Operand, list[int]]) -> Iterator[Span]:
    """Where a group may start, and where it ends at the earliest."""
    for users in uses.values():
        for last, following in zip(users[1:], [*users[2:], len(network.steps) + 9]):
            end = _end(network, uses, users[0], last + 1)
            if end and following > end + 3:  # otherwise the group is part of a larger one, such as a residual block
                yield users[0], end
    named: dict[str, list[int]] = {}
    for at, step in enumerate(network.steps):
        name = step.layer.name if step.layer else step.name
        for digit in re.finditer(r"\d(?=_)", f"{name}_" if step.layer and step.layer.is_block else name):
            named.setdefault(name[: digit.end()], []).append(at)
    yield from ((places[0], places[-1] + 1) for places in named.values())


def _end(network: Class, uses: dict[Operand, list[int]], start: int, least: int) -> int | None:
    """The end of the shortest group from `start` on that has one output."""
    live: dict[Entry, int] = {}  # for each output, where it is used last
    for at, step in enumerate(network.steps[start : start + MOST_STEPS], start):
        live.update((entry, uses[entry][-1]) for entry in step.outputs if entry in uses)
        live = {entry: last for entry, last in live.items() if last > at}
        if at + 1 >= least and len(live) == 1:
            return at + 1
    return None


def _inputs(steps: list[Statement]) -> list[Entry]:
    inside = {entry for step in steps for entry in step.outputs}
    return list(dict.fromkeys(entry for step in steps for entry in step.entries() if entry not in inside))


def _form(network: Class, span: Span, calls: Counter[Layer], least: int = 3) -> tuple[Any, ...] | None:
    """What the spans of a group have in common. None if this span cannot be a block.

    calls: how often the network uses each layer. least: steps of a block.
    """
    steps = network.steps[slice(*span)]
    inputs, layers = _inputs(steps), layers_of(steps)
    inside = Counter(layer for step in steps for layer in step.layers())
    if any(step.is_loop for step in steps):
        return None
    if len(layers) < 2 or len(steps) < least or not 0 < len(inputs) <= MOST_INPUTS:
        return None
    if all(layer.is_block for layer in layers) or any(not x.alone or inside[x] < calls[x] for x in layers):
        return None
    return form(steps, inputs)


def _extended(network: Class, spans: list[Span]) -> list[Span]:
    """The spans with the steps that follow all of them, such as an activation, and then with those before all."""
    uses, calls = network.uses(), network.calls()

    def is_longer(span: Span, longer: Span) -> bool:
        """Whether the step next to a span has the span's name, and no other inputs and outputs than the span."""
        if longer[0] < 0 or longer[1] > len(network.steps):
            return False
        step, steps = network.steps[longer[0] if longer[0] < span[0] else span[1]], network.steps[slice(*span)]
        if (
            step.is_loop
            or step.layer
            and (step.layer.is_block or common_path(layers_of([*steps, step])) != common_path(layers_of(steps)))
        ):
            return False
        alike = len(_inputs(network.steps[slice(*longer)])) == len(_inputs(steps))
        return alike and _end(network, uses, *longer) == longer[1]

    for before, after in ((0, 1), (1, 0)):
        while True:
            longer = [(start - before, end + after) for start, end in spans]
            apart = all(end <= start for (_, end), (start, _) in zip(longer, longer[1:]))
            if not apart or not all(map(is_longer, spans, longer)):
                break
            if len({_form(network, span, calls) for span in longer}) > 1:
                break
            spans = longer
    return spans


def common_path(layers: list[Layer]) -> str:
    """The beginning that the names of layers have in common: stage1 for stage1_conv0 and stage1_batchnorm0."""
    names = [layer.name.split("_")[: None if layer.is_block else -1] for layer in layers]
    return "_".join(os.path.commonprefix(names))


def _block_names(network: Class, spans: list[Span]) -> tuple[str, list[str]]:
    """A name for the class of blocks, such as Unit for unit1 and unit2, and the name of each block."""
    groups = [layers_of(network.steps[slice(*span)]) for span in spans]
    paths = [common_path(layers) for layers in groups]
    named = {layer for layer in layers_of(network.steps) if layer.name.startswith((*paths,))}
    only = len({*paths}) == len(paths) and named == {layer for layers in groups for layer in layers}
    return only and re.sub(r"\d+$", "", paths[0].rpartition("_")[2]).capitalize() or "Block", paths


def _outline(
    network: Class, spans: list[Span], kind: str, paths: list[str], names: list[str] | None = None
) -> Class:
    """Create a class, and replace the spans by calls of its instances.

    paths: the names of the instances. names: of the layers of a unit.
    """
    starts = [network.steps[slice(*span)] for span in spans]
    uses, old = network.uses(), starts[0]
    inputs = {entry: f"x{k + 1}" if k else "x" for k, entry in enumerate(_inputs(old))}
    results = [
        [entry for step in steps for entry in step.outputs if uses.get(entry, [-1])[-1] >= end]
        for steps, (_, end) in zip(starts, spans)
    ]
    block, layers = define(kind, starts, inputs, [*results[0]], paths, names)
    for (start, end), steps, layer, outputs in reversed([*zip(spans, starts, layers, results)]):
        layer.is_unit = names is not None
        network.steps[start:end] = [Statement(layer.name or "block", call_of(inputs), [*_inputs(steps)], outputs, layer)]
    return block


def call_of(inputs: Collection[object]) -> str:
    """The code that calls a layer with all inputs."""
    return f"self.layer({', '.join(f'_{k}_' for k in range(len(inputs)))})"


def define(
    kind: str,
    bodies: list[list[Statement]],
    inputs: dict[Entry, str],
    results: list[Operand],
    paths: list[str],
    names: list[str] | None = None,
) -> tuple[Class, list[Layer]]:
    """A class for equal steps, and its instance for each of the bodies.

    inputs, results: of the first body. paths: the names of the instances. names: of the layers in the class.
    """
    groups = [layers_of(body) for body in bodies]
    names, (words, codes, values) = names or _local_names(groups, paths), _arguments(groups)
    moved = {layer: replace(layer, name=name, code=code) for layer, name, code in zip(groups[0], names, codes)}
    steps, instances = list[Statement](), list[Layer]()
    for step in bodies[0]:
        operands = [Parameter(moved[x.layer], x.name) if isinstance(x, Parameter) else x for x in step.operands]
        layer = step.layer and moved[step.layer]
        name = layer.name if layer else step.name.removeprefix(f"{paths[0]}_")
        steps.append(replace(step, name=name, operands=operands, layer=layer))
    for path, layers, numbers in zip(paths, groups, values):
        state = {join(name, key): array for layer, name in zip(layers, names) for key, array in layer.state.items()}
        instances.append(Layer(path, f"{kind}({', '.join(map(repr, numbers))})", state, words))
    defaults = dict[str, str]()
    for word, column in [*zip(words, zip(*values))][2:]:
        value, count = Counter(column).most_common(1)[0]
        if 2 * count > len(column):
            defaults[word] = repr(value)
    return Class(kind, words, inputs, steps, results, defaults), instances


def join(name: str, key: str) -> str:
    """The name of a layer's parameter."""
    return f"{name}.{key}" if key else name


def _local_names(groups: list[list[Layer]], paths: list[str]) -> list[str]:
    """The names of a class's layers: their own without the path. If these differ, such as conv2 and conv5, they are
    numbered."""
    inside = [
        [layer.name.removeprefix(path).strip("_") or "block" for layer in layers] for layers, path in zip(groups, paths)
    ]
    names, used = inside[0], {*TAKEN}
    if any(other != names for other in inside) or len({*names}) < len(names):
        names = [re.sub(r"\d+$", "", name) for name in names]
        names = [f"{name}{names[:k].count(name)}" if names.count(name) > 1 else name for k, name in enumerate(names)]
    return [identifier(name, used) for name in names]


def _arguments(groups: list[list[Layer]]) -> tuple[tuple[str, ...], list[str], list[list[Any]]]:
    """The arguments of a class, the code of its layers, and the values of the arguments for each group."""
    known: dict[tuple[Any, ...], str] = {}  # {the value for each group: the argument}
    codes = list[str]()
    for first, *others in zip(*groups):
        code, end = "", 0
        places = [[*NUMBER.finditer(layer.code)] for layer in (first, *others)]
        words = first.words or next((names for start, names in WORDS.items() if first.code.startswith(start)), ())
        for k, found in enumerate(zip(*places)):
            column = tuple(ast.literal_eval(place[0]) for place in found)
            text = repr(column[0]) if len({*column}) == 1 else known.get(column) or _ratio(column, known)
            code += first.code[end : found[0].start()]
            if not text:
                option = re.search(r"(\w+)=$", code)
                word = option[1] if option else words[k] if k < len(words) else "size"
                numbered = (f"{word.rstrip(string.digits)}{number}" for number in ["", *range(2, len(known) + 3)])
                text = known[column] = next(name for name in numbered if name not in known.values())
            code, end = code + text, found[0].end()
        codes.append(code + first.code[end:])
    return tuple(known.values()), codes, [list(values) for values in zip(*known)] or [[] for _ in groups]


def _ratio(column: tuple[Any, ...], known: dict[tuple[Any, ...], str]) -> str | None:
    """Values as a multiple or a fraction of an argument's."""
    for other, word in known.items():
        if all(type(value) is int and value > 0 for value in column + other):
            ratios = {Fraction(value, base) for value, base in zip(column, other)}
            if len(ratios) == 1 and 1 in ratios.copy().pop().as_integer_ratio():
                above, below = ratios.pop().as_integer_ratio()
                return f"{above} * {word}" if below == 1 else f"{word} // {below}"
    return None


def _connect(network: Class) -> None:
    """Make one layer of blocks that follow each other."""
    paths = Counter(step.layer.name for step in network.steps if step.layer and _calls_block(step))
    uses, runs = network.uses(), list[tuple[str, list[Statement]]]()
    for at, step in enumerate(network.steps):
        name = _container(step.layer.name, paths) if step.layer and _calls_block(step) else ""
        if name and runs and runs[-1][0] == name:
            before = runs[-1][1][-1]
            follows = step.operands[0] == before.outputs[0] and {*uses[before.outputs[0]]} == {at}
            if follows and step.operands[1:] == before.operands[1:]:
                runs[-1][1].append(step)
                continue
        runs.append((name, [step]))
    network.steps = [_connected(*run) if len(run[1]) > 1 else run[1][0] for run in runs]
    unnamed = [step.layer for step in network.steps if step.layer and step.layer.name in ("", "blocks")]
    for k, layer in enumerate(unnamed):
        layer.name = f"block{k}"


def _calls_block(step: Statement) -> bool:
    return bool(step.layer and step.layer.is_block and not step.is_loop)


def _container(path: str, paths: Counter[str]) -> str:
    """The name of the list that contains a block: stage1 for stage1_unit2, transformer for transformer0, and stage1 for
    each of several blocks with this name."""
    if paths[path] > 1 or not path:
        return path or "blocks"
    parent, _, last = path.rpartition("_")
    return parent or re.sub(r"\d+$", "", last) or "blocks"


def _connected(name: str, steps: list[Statement]) -> Statement:
    layers = layers_of(steps)
    words = list[str]()
    for code, equal in groupby(layer.code for layer in layers):
        count = len([*equal])
        words += [f"*({code} for _ in range({count}))"] if count > 2 else [code] * count
    state = {f"{k}.{key}": array for k, layer in enumerate(layers) for key, array in layer.state.items()}
    single = len(steps[0].operands) == 1
    code = f"nn.Sequential({', '.join(words)})" if single else f"nn.ModuleList([{', '.join(words)}])"
    return replace(steps[0], name=name, outputs=steps[-1].outputs, layer=Layer(name, code, state), repeated=not single)
