"""What generated code is made of: statements, the layers that they call, and classes."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, count, groupby
from typing import NamedTuple, Union

import numpy as np

from gluon_mgpu.convert.graph import Entry

# Attributes of nn.Module that a layer must not replace
TAKEN = """apply buffers children compile cpu cuda double eval float forward half load_state_dict modules
    parameters state_dict to train training type zero_grad""".split()


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

    def layers(self) -> list[Layer]:
        others = [operand.layer for operand in self.operands if isinstance(operand, Parameter)]
        return [*others, self.layer] if self.layer else others

    def entries(self) -> list[Entry]:
        return [operand for operand in self.operands if not isinstance(operand, Parameter)]


class Carried(NamedTuple):
    """An input that is an output of the time step before. first: the input of the first time step."""

    first: Operand
    output: int


class Elements(NamedTuple):
    """An input for each time step."""

    operands: tuple[Operand, ...]


class Modules(NamedTuple):
    """A layer for each time step. layer: the list of them."""

    layer: Layer


Input = Union[Operand, Carried, Elements, Modules]  # an operand that is the same for all time steps


@dataclass
class Loop(Statement):
    """Statements for each time step, or a call of their class; in its code, _0_ is the first of `inputs`."""

    count: int = 0
    body: list[Statement] = field(default_factory=list)  # of the first time step
    inputs: dict[Entry, Input] = field(default_factory=dict)  # by what the body of the first time step calls them
    results: list[tuple[Entry, ...]] = field(default_factory=list)  # for each output, its entry at each time step

    def layers(self) -> list[Layer]:
        lists = [given.layer for given in self.inputs.values() if isinstance(given, Modules)]
        return [*lists, *([self.layer] if self.layer else layers_of(self.body))]

    def names(self) -> list[str]:
        """Names for the inputs inside the loop."""
        kinds = [{Carried: "state", Elements: "x"}.get(type(given), "other") for given in self.inputs.values()]
        return [f"{kind}{kinds[:k].count(kind) + 1}" if kind in kinds[:k] else kind for k, kind in enumerate(kinds)]


@dataclass
class Class:
    """The code of a block or of the network."""

    name: str
    words: tuple[str, ...]  # the arguments of its constructor
    inputs: dict[Entry, str]
    steps: list[Statement]
    results: list[Operand]
    defaults: dict[str, str] = field(default_factory=dict)  # of its arguments

    def statements(self) -> list[Statement]:
        """The steps, and one that uses the results."""
        return [*self.steps, Statement("", "", self.results, [])]

    def layers(self) -> list[Layer]:
        return layers_of(self.statements())

    @property
    def call(self) -> str:
        """The code of a statement that calls an instance with all inputs."""
        return f"self.layer({', '.join(f'_{k}_' for k in range(len(self.inputs)))})"

    def uses(self) -> dict[Operand, list[int]]:
        """For each value, the steps that use it, in order. Results are used after the last step."""
        uses: dict[Operand, list[int]] = {}
        for at, step in enumerate(self.statements()):
            for entry in step.entries():
                uses.setdefault(entry, []).append(at)
        return uses

    def calls(self) -> Counter[Layer]:
        """How often each layer is used."""
        return Counter(layer for step in self.statements() for layer in step.layers())


def layers_of(steps: Iterable[Statement]) -> list[Layer]:
    return list(dict.fromkeys(layer for step in steps for layer in step.layers()))


def list_of(name: str, layers: list[Layer], code: str = "nn.ModuleList([{}])") -> Layer:
    """A layer that is a list of layers. code: creates it from their code."""
    words = list[str]()
    for create, equal in groupby(layer.code for layer in layers):
        times = len([*equal])
        words += [f"*({create} for _ in range({times}))"] if times > 2 else [create] * times
    state = {f"{k}.{key}": array for k, layer in enumerate(layers) for key, array in layer.state.items()}
    return Layer(name, code.format(", ".join(words)), state)


def identifier(name: str, others: set[str]) -> str:
    """Convert a name to an identifier that is not in `others`, and add the identifier to `others`."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_")
    if not name[:1].isalpha():
        name = f"layer{name}"
    if keyword.iskeyword(name) or name in TAKEN:
        name += "_"
    name = next(unique for unique in chain([name], (f"{name}_{k}" for k in count(2))) if unique not in others)
    others.add(name)
    return name


def join(name: str, key: str) -> str:
    """The name of a layer's parameter."""
    return f"{name}.{key}" if key else name
