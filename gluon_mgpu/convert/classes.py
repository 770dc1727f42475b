"""Makes a class of equal groups of statements, such as repeated blocks or the bodies of loops."""

from __future__ import annotations

import ast
import os
import re
import string
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from gluon_mgpu.convert.graph import Entry
from gluon_mgpu.convert.statements import (
    TAKEN,
    Class,
    Layer,
    Operand,
    Parameter,
    Statement,
    identifier,
    join,
    layers_of,
)

# A constant, or a tuple of numbers
NUMBER = re.compile(r"(?<!\w)\((?:-?\d+(?:, )?)+,?\)|(?<![\w.])-?\d[\d.]*(?:e-?\d+)?|\b(?:True|False)\b")
# Names for the numbers that create a layer
ARGUMENTS = {"nn.Conv": ("inputs", "channels"), "nn.Linear": ("inputs", "units"), "nn.BatchNorm": ("channels",)}


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


def common_path(layers: list[Layer]) -> str:
    """The beginning that the names of layers have in common: stage1 for stage1_conv0 and stage1_batchnorm0."""
    names = [layer.name.split("_")[: None if layer.is_block else -1] for layer in layers]
    return "_".join(os.path.commonprefix(names))


def define(
    kind: str,
    taken: set[str],
    bodies: list[list[Statement]],
    inputs: dict[Entry, str],
    results: list[Operand],
    paths: list[str],
    names: list[str] | None = None,
) -> tuple[Class, list[Layer]]:
    """A class for equal steps, and its instance for each of the bodies.

    kind: the class has this name, or this name with a number if it is in `taken`, to which the name is added. inputs,
    results: of the first body. paths: the names of the instances. names: of the layers in the class.
    """
    alike = sum(bool(re.fullmatch(rf"{kind}\d*", name)) for name in taken)
    kind = identifier(f"{kind}{alike + 1}" if alike else kind, taken)
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
        value, times = Counter(column).most_common(1)[0]
        if 2 * times > len(column):
            defaults[word] = repr(value)
    return Class(kind, words, inputs, steps, results, defaults), instances


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
    arguments: dict[tuple[Any, ...], str] = {}  # {the value for each group: the argument}
    codes = list[str]()
    for first, *others in zip(*groups):
        code, end = "", 0
        places = [[*NUMBER.finditer(layer.code)] for layer in (first, *others)]
        words = first.words or next((names for start, names in ARGUMENTS.items() if first.code.startswith(start)), ())
        for k, found in enumerate(zip(*places)):
            column = tuple(ast.literal_eval(place[0]) for place in found)
            text = repr(column[0]) if len({*column}) == 1 else arguments.get(column) or _ratio(column, arguments)
            code += first.code[end : found[0].start()]
            if not text:
                option = re.search(r"(\w+)=$", code)
                word = option[1] if option else words[k] if k < len(words) else "size"
                numbered = (f"{word.rstrip(string.digits)}{number}" for number in ["", *range(2, len(arguments) + 3)])
                text = arguments[column] = next(name for name in numbered if name not in arguments.values())
            code, end = code + text, found[0].end()
        codes.append(code + first.code[end:])
    return tuple(arguments.values()), codes, [list(values) for values in zip(*arguments)] or [[] for _ in groups]


def _ratio(column: tuple[Any, ...], arguments: dict[tuple[Any, ...], str]) -> str | None:
    """Values as a multiple or a fraction of an argument's."""
    for other, word in arguments.items():
        if all(type(value) is int and value > 0 for value in column + other):
            ratios = {Fraction(value, base) for value, base in zip(column, other)}
            if len(ratios) == 1 and 1 in ratios.copy().pop().as_integer_ratio():
                above, below = ratios.pop().as_integer_ratio()
                return f"{above} * {word}" if below == 1 else f"{word} // {below}"
    return None
