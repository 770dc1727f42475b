"""Generates PyTorch code for MXNet's operators, with one function for each kind of operator.

The graph comes from a file, and the generated code is executed. For safety, the code contains nothing from the file
except identifiers and numbers: `call` writes numbers with repr, and all strings passed to it are identifiers or come
from this package.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gluon_mgpu.convert.network import TRUE, refuse

LAYOUTS = {1: "NCW", 2: "NCHW", 3: "NCDHW"}  # {number of spatial dimensions: layout}
SIGNS = {"add": "+", "plus": "+", "sub": "-", "minus": "-", "mul": "*", "div": "/"}
ACTIVATIONS = {
    "relu": "F.relu",
    "sigmoid": "torch.sigmoid",
    "tanh": "torch.tanh",
    "softrelu": "F.softplus",
    "softsign": "F.softsign",
}
Sizes = tuple[int, ...]


def call(function: str, *args: Any, **options: Any) -> str:
    """Generate the code `function(*args, **options)`. Options that are None are omitted; strings are used as code."""
    words = [*map(_code, args), *(f"{name}={_code(value)}" for name, value in options.items() if value is not None)]
    return f"{function}({', '.join(words)})"


def _code(value: str | float | Sizes) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return value if isinstance(value, str) else repr(value)


def _short(sizes: Sizes) -> int | Sizes:
    """Use PyTorch's short form if all sizes are equal: 3 for (3, 3)."""
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _unless(default: Any, value: Any) -> Any:
    return None if value == default else value


@dataclass
class Node:
    """An operator of the graph, and its layer in PyTorch if it has parameters."""

    step: int
    facts: dict[str, Any]  # the operator's entry in the graph file
    name: str  # the layer's name; an identifier
    inputs: list[int]  # the steps that compute the inputs, except parameters
    shape: Sizes  # the first input's shape, for a batch of 1
    params: list[str]  # names of the parameters in the graph
    arrays: list[np.ndarray]  # values of the parameters
    layer: str = ""  # the code that creates the layer
    state: dict[str, np.ndarray] = field(default_factory=dict)  # the layer's part of the state dict
    frozen: bool = False  # whether the layer's weight is constant

    @property
    def op(self) -> str:
        return self.facts["op"]

    def code(self, *inputs: str) -> str:
        """Generate code that applies the operator to variables.

        Raises UsageError if the operator cannot be converted.
        """
        try:
            return OPERATORS[self.op](self, *inputs)
        except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError) as error:
            raise refuse(self.facts, "PyTorch", " ".join(str(error).split())) from None

    def create(self, layer: str, *names: str) -> str:
        """Set the layer's code and state. Returns an expression that refers to the layer. names: PyTorch's names of the
        layer's parameters."""
        self.layer = layer
        self.state = {f"{self.name}.{name}": array for name, array in zip(names, self.arrays)}
        return f"self.{self.name}"

    # The graph file stores attributes as text. The next methods convert them, and raise SyntaxError or ValueError if a
    # value is not supported.

    def text(self, key: str, default: str) -> str:
        return self.facts.get("attrs", {}).get(key, default)

    def word(self, key: str, default: str, *others: str) -> str:
        word = self.text(key, default)
        if word not in (default, *others):
            raise ValueError(f"{key}={word!r} is not supported")
        return word

    def flag(self, key: str, default: bool = False) -> bool:
        return self.text(key, str(default)) in TRUE

    def number(self, key: str, default: float = math.nan) -> float:
        return float(self.text(key, str(default)))

    def integer(self, key: str, default: int) -> int:
        return int(self.text(key, str(default)))

    def sizes(self, key: str, default: Sizes = ()) -> Sizes:
        value = ast.literal_eval(self.text(key, "()").replace("L", ""))  # Python 2 wrote (3L, 3L)
        values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if values in ((), (None,)):
            return default
        if not all(type(value) is int for value in values):
            raise ValueError(f"{key}={value!r} is not supported")
        return values


# Operators with parameters


def convolution(node: Node, x: str) -> str:
    kernel = node.sizes("kernel")
    n = len(kernel)
    node.word("layout", LAYOUTS[n], "None")
    if any(node.sizes("target_shape")):
        raise ValueError("target_shape is not supported")
    groups, transposed = node.integer("num_group", 1), node.op == "Deconvolution"
    channels = node.arrays[0].shape[0], node.arrays[0].shape[1] * groups
    layer = call(
        f"nn.Conv{'Transpose' * transposed}{n}d",
        *(channels if transposed else channels[::-1]),
        kernel_size=_short(kernel),
        stride=_unless(1, _short(node.sizes("stride", (1,)))),
        padding=_unless(0, _short(node.sizes("pad", (0,)))),
        output_padding=_unless(0, _short(node.sizes("adj", (0,)))),
        dilation=_unless(1, _short(node.sizes("dilate", (1,)))),
        groups=_unless(1, groups),
        bias=_unless(True, len(node.arrays) == 2),
    )
    return call(node.create(layer, "weight", "bias"), x)


def fully_connected(node: Node, x: str) -> str:
    units, inputs = node.arrays[0].shape
    layer = node.create(call("nn.Linear", inputs, units, bias=_unless(True, len(node.arrays) == 2)), "weight", "bias")
    return call(layer, f"{x}.flatten(1)" if node.flag("flatten", True) and len(node.shape) > 2 else x)


def batch_norm(node: Node, x: str) -> str:
    rank, eps = len(node.shape), node.number("eps", 1e-3)
    if node.integer("axis", 1) % rank != 1:
        raise ValueError("axis must be 1")
    momentum = float(f"{1 - node.number('momentum', 0.9):.6g}")  # PyTorch's momentum is the weight of the new value
    layer = call(f"nn.BatchNorm{max(rank - 2, 1)}d", len(node.arrays[0]), eps=eps, momentum=momentum)
    name = node.create(layer, "weight", "bias", "running_mean", "running_var")
    node.frozen = node.flag("fix_gamma", True)
    if node.flag("use_global_stats"):
        state = (f"{name}.{key}" for key in ("running_mean", "running_var", "weight", "bias"))
        return call("F.batch_norm", x, *state, eps=eps)
    return call(name, x)


def layer_norm(node: Node, x: str) -> str:
    if node.integer("axis", -1) % len(node.shape) != len(node.shape) - 1:
        raise ValueError("axis must be -1")
    layer = call("nn.LayerNorm", len(node.arrays[0]), eps=node.number("eps", 1e-5))
    return call(node.create(layer, "weight", "bias"), x)


def instance_norm(node: Node, x: str) -> str:
    n = len(node.shape) - 2
    layer = call(f"nn.InstanceNorm{n}d", len(node.arrays[0]), eps=node.number("eps", 1e-3), affine=True)
    return call(node.create(layer, "weight", "bias"), x)


def group_norm(node: Node, x: str) -> str:
    groups = node.integer("num_groups", 1)
    layer = node.create(call("nn.GroupNorm", groups, groups, eps=node.number("eps", 1e-5)), "weight", "bias")
    # MXNet has one weight per group; PyTorch has one per channel. So each group becomes one channel.
    y = call(layer, call(f"{x}.unflatten", 1, (groups, -1)))
    return call(f"{y}.flatten", 1, 2)


def embedding(node: Node, x: str) -> str:
    layer = node.create(call("nn.Embedding", *node.arrays[0].shape), "weight")
    return call(layer, f"{x}.long()")


def leaky_relu(node: Node, x: str) -> str:
    kind, slope = node.word("act_type", "leaky", "elu", "selu", "gelu", "prelu"), node.number("slope", 0.25)
    if kind == "prelu":
        return call(node.create(call("nn.PReLU", node.arrays[0].size), "weight"), x)
    if kind == "leaky":
        return call("F.leaky_relu", x, negative_slope=slope)
    return call(f"F.{kind}", x, alpha=slope if kind == "elu" else None)


# Operators without parameters


def activation(node: Node, x: str) -> str:
    return call(ACTIVATIONS[node.word("act_type", *ACTIVATIONS)], x)


def pooling(node: Node, x: str) -> str:
    n, kind = len(node.shape) - 2, node.word("pool_type", "max", "avg")
    node.word("layout", LAYOUTS[n], "None")
    if node.flag("global_pool"):
        return call(f"F.adaptive_{kind}_pool{n}d", x, 1)
    kernel = _short(node.sizes("kernel"))
    return call(
        f"F.{kind}_pool{n}d",
        x,
        kernel_size=kernel,
        stride=_unless(kernel, _short(node.sizes("stride", (1,)))),
        padding=_unless(0, _short(node.sizes("pad", (0,)))),
        ceil_mode=_unless(False, node.word("pooling_convention", "valid", "full") == "full"),
        count_include_pad=_unless(True, kind == "max" or node.flag("count_include_pad", True)),
    )


def pad(node: Node, x: str) -> str:
    mode = {"edge": "'replicate'", "reflect": "'reflect'"}[node.word("mode", "reflect", "edge")]
    widths = node.sizes("pad_width")  # two widths per axis; F.pad expects the last axis first
    return call("F.pad", x, tuple(w for i in range(len(widths) - 2, 3, -2) for w in widths[i : i + 2]), mode=mode)


def flatten(node: Node, x: str) -> str:
    return call(f"{x}.flatten", 1)


def reshape(node: Node, x: str) -> str:
    node.word("reverse", "False", "0")
    sizes = node.sizes("shape")
    if min(sizes) < -1:
        raise ValueError(f"shape={sizes} is not supported")
    return call(f"{x}.reshape", *(size or f"{x}.shape[{i}]" for i, size in enumerate(sizes)))


def transpose(node: Node, x: str) -> str:
    return call(f"{x}.permute", *node.sizes("axes", tuple(range(len(node.shape)))[::-1]))


def swap_axes(node: Node, x: str) -> str:
    return call(f"{x}.transpose", node.integer("dim1", 0), node.integer("dim2", 0))


def concat(node: Node, *inputs: str) -> str:
    return call("torch.cat", f"[{', '.join(inputs)}]", dim=node.integer("dim", 1))


def dropout(node: Node, x: str) -> str:
    node.word("mode", "training")
    node.word("axes", "()", "[]", "None")
    return call("F.dropout", x, node.number("p", 0.5), "self.training")


def softmax(node: Node, x: str) -> str:
    node.word("temperature", "None", "1.0")
    node.word("use_length", "False", "0", "None")
    return call(f"F.{node.op}", x, dim=node.integer("axis", -1))


def mean(node: Node, x: str) -> str:
    node.word("exclude", "False", "0")
    axes = node.sizes("axis", tuple(range(len(node.shape))))
    return call(f"{x}.mean", dim=_short(axes), keepdim=_unless(False, node.flag("keepdims")))


def clip(node: Node, x: str) -> str:
    return call(f"{x}.clamp", node.number("a_min"), node.number("a_max"))


def arithmetic(node: Node, a: str, b: str) -> str:
    return f"{a} {SIGNS[node.op.rpartition('_')[2]]} {b}"


def scalar_arithmetic(node: Node, x: str) -> str:
    return f"{x} {SIGNS[node.op.split('_')[1]]} {_code(node.number('scalar'))}"


def identity(node: Node, x: str) -> str:
    return x


def function(node: Node, x: str) -> str:
    return call(f"torch.{node.op}", x)


LAYERS: dict[str, Callable[..., str]] = {
    **dict.fromkeys(("Convolution", "Deconvolution"), convolution),
    "FullyConnected": fully_connected,
    "BatchNorm": batch_norm,
    "LayerNorm": layer_norm,
    "InstanceNorm": instance_norm,
    "GroupNorm": group_norm,
    "Embedding": embedding,
    "LeakyReLU": leaky_relu,
}
OPERATORS: dict[str, Callable[..., str]] = {
    **LAYERS,
    "Activation": activation,
    "Pooling": pooling,
    "Pad": pad,
    "Flatten": flatten,
    "Reshape": reshape,
    "transpose": transpose,
    "SwapAxis": swap_axes,
    "Concat": concat,
    "Dropout": dropout,
    "mean": mean,
    "clip": clip,
    "_copy": identity,  # Gluon writes Dropout(0) as _copy
    **dict.fromkeys(("softmax", "log_softmax"), softmax),
    **dict.fromkeys(("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "square", "abs"), function),
    **{f"{kind}_{name}": arithmetic for kind in ("elemwise", "broadcast") for name in ("add", "sub", "mul", "div")},
    **{f"_{name}_scalar": scalar_arithmetic for name in ("plus", "minus", "mul", "div")},
}
