"""Finds blocks in the code of a network: groups of steps that occur several times, and become one class.

A group is found where branches leave a value and meet again, as in a residual block, and where layers have a common
name such as transformer0. Its occurrences have the same operators, connected in the same way. The numbers that create
their layers may differ: they become arguments of the class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gluon_mgpu.convert.classes import common_path, define, form
from gluon_mgpu.convert.graph import Entry
from gluon_mgpu.convert.statements import Class, Layer, Loop, Operand, Statement, layers_of, list_of

MOST_STEPS, MOST_INPUTS = 400, 4  # of a group
LEAST_UNITS = 3  # that become a class
ACTIVATION = re.compile(r"(torch|F)\.\w*(elu|sigmoid|tanh|swish)\(_0_[^_]*\)$|_0_\.clamp\(")
Span = tuple[int, int]  # of steps: the first one, and the one after the last


def find(network: Class, taken: set[str]) -> list[Class]:
    """Move blocks of a network into classes, which are returned. taken: names that the classes cannot have."""
    _move_independent(network)
    classes = list[Class]()
    for kind, length in (("ConvNormAct", 3), ("ConvNorm", 2)):
        while spans := _units(network, length):
            paths = [layers_of(network.steps[slice(*span)])[0].name for span in spans]
            classes.append(_outline(network, spans, kind, taken, paths, ["conv", "norm"]))
    while spans := _best(network):
        spans = _extended(network, spans)
        kind, paths = _block_names(network, spans)
        classes.append(_outline(network, spans, kind, taken, paths))
    _connect(network)
    return classes


def _move_independent(network: Class) -> None:
    """Move steps that depend on no layer, such as the computation of a mask that several blocks use, first."""
    known, independent, moved = {*network.inputs}, set[int](), set[int]()
    for at, step in enumerate(network.steps):
        if not step.layers() and known.issuperset(step.entries()):
            independent.add(at)
            known.update(step.outputs)
    uses = network.uses()
    for at in sorted(independent, reverse=True):
        users = {user for entry in network.steps[at].outputs for user in uses.get(entry, [])}
        if len(users - independent) > 1 or users & moved:
            moved.add(at)
    network.steps = [network.steps[at] for at in sorted(range(len(network.steps)), key=lambda at: at not in moved)]


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

    def priority(spans: list[Span]) -> tuple[int, int, bool, int]:
        layers = layers_of(network.steps[slice(*spans[0])])
        depth = len(re.findall(r"\d(?=_|$)", common_path(layers)))  # 2 for stage1_unit1
        return len(spans), depth, not any(layer.is_block for layer in layers), spans[0][1] - spans[0][0]

    for starts in (_starts(network, uses), _branches(uses)):
        groups: dict[Any, list[Span]] = {}
        for start, least in sorted({*starts}):
            end = _end(network, uses, start, least)
            found = end and _form(network, (start, end), calls)
            if end and found and (found not in groups or groups[found][-1][1] <= start):
                groups.setdefault(found, []).append((start, end))
        if repeated := [spans for spans in groups.values() if len(spans) > 1]:
            return max(repeated, key=priority)
    return []


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


def _branches(uses: dict[Operand, list[int]]) -> Iterator[Span]:
    """Where branches of one value start, and where they end at the earliest: before or after the next step that uses
    it. The last branch may be as long as the one before."""
    for users in uses.values():
        if len(users) > 1:
            ends = [*users[1:], 2 * users[-1] - users[-2]]
            yield from ((start, end + more) for start, end in zip(users, ends) for more in (0, 1))


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
    if any(isinstance(step, Loop) for step in steps):
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
            isinstance(step, Loop)
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


def _block_names(network: Class, spans: list[Span]) -> tuple[str, list[str]]:
    """A name for the class of blocks, such as Unit for unit1 and unit2, and the name of each block."""
    groups = [layers_of(network.steps[slice(*span)]) for span in spans]
    paths = [common_path(layers) for layers in groups]
    named = {layer for layer in network.layers() if layer.name.startswith((*paths,))}
    only = len({*paths}) == len(paths) and named == {layer for layers in groups for layer in layers}
    return only and re.sub(r"\d+$", "", paths[0].rpartition("_")[2]).capitalize() or "Block", paths


def _outline(
    network: Class, spans: list[Span], kind: str, taken: set[str], paths: list[str], names: list[str] | None = None
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
    block, layers = define(kind, taken, starts, inputs, [*results[0]], paths, names)
    for (start, end), steps, layer, outputs in reversed([*zip(spans, starts, layers, results)]):
        layer.is_unit = names is not None
        network.steps[start:end] = [Statement(layer.name or "block", block.call, [*_inputs(steps)], outputs, layer)]
    return block


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
    return bool(step.layer and step.layer.is_block and not isinstance(step, Loop))


def _container(path: str, paths: Counter[str]) -> str:
    """The name of the list that contains a block: stage1 for stage1_unit2, transformer for transformer0, and stage1 for
    each of several blocks with this name."""
    if paths[path] > 1 or not path:
        return path or "blocks"
    parent, _, last = path.rpartition("_")
    return parent or re.sub(r"\d+$", "", last) or "blocks"


def _connected(name: str, steps: list[Statement]) -> Statement:
    single = len(steps[0].operands) == 1
    layer = list_of(name, layers_of(steps), *(["nn.Sequential({})"] if single else []))
    return replace(steps[0], name=name, outputs=steps[-1].outputs, layer=layer, repeated=not single)
