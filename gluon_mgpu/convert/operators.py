"""Generates PyTorch code for MXNet's operators, from a template or with a function for each kind of operator.

The graph comes from a file, and the generated code is executed. For safety, the code contains nothing from the file
except identifiers and numbers: `call` and templates write values with repr, and all strings passed to them are
identifiers or come from this package.
"""

from __future__ import annotations

import ast
import functools
import math
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gluon_mgpu.convert.network import TRUE, Shape, refuse

DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float32")
LOWEST = float(np.finfo(np.float32).min)
# Attributes that do not change what an operator computes: in any case, or (DEFAULTS) if they have one of these values
HARMLESS = """cudnn_off cudnn_tune ctx dtype input_dim key ndev no_bias num_args num_filter num_hidden output_dim
    sparse_grad state_outputs workspace""".split()
DEFAULTS = {
    "layout": ("NCW", "NCHW", "NCDHW"),
    "mode": ("training",),
    "sample_type": ("nearest",),
}


def call(function: str, *args: Any, **options: Any) -> str:
    """Generate the code `function(*args, **options)`. Options that are None are omitted; strings are used as code."""
    words = [*map(_code, args), *(f"{name}={_code(value)}" for name, value in options.items() if value is not None)]
    return f"{function}({', '.join(words)})"


def _code(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _short(sizes: Shape) -> int | Shape:
    """Use PyTorch's short form if all sizes are equal: 3 for (3, 3)."""
    return sizes[0] if len(set(sizes)) == 1 else sizes


def _unless(default: Any, value: Any) -> Any:
    return None if value == default else value


@dataclass
class Node:
    """An operator of the graph, and its layer in PyTorch if it has one."""

    op: str
    title: str  # its name in the graph, for messages
    attrs: dict[str, str]
    name: str  # the layer's name; an identifier
    inputs: list[list[Shape]]  # the shape of each input that is not a layer's parameter, for each sample
    outputs: list[list[Shape]]  # the shape of each output, for each sample
    arrays: list[np.ndarray]  # values of the layer's parameters
    layer: str = ""  # the code that creates the layer
    state: dict[str, np.ndarray] = field(default_factory=dict)  # the layer's part of the state dict
    frozen: bool = False  # whether the layer's weight is constant
    nested: bool = False  # whether the layer returns (output, state)
    read: set[str] = field(default_factory=set)  # the attributes that were used

    @property
    def rank(self) -> int:
        return len(self.inputs[0][0])

    def code(self, *inputs: str) -> str:
        """Generate code that applies the operator to inputs, which are expressions.

        Raises UsageError if the operator cannot be converted.
        """
        try:
            rule = OPERATORS[self.op]
            code = rule(self, *inputs) if callable(rule) else _Template(self).vformat(rule, inputs, {})
            for key, text in self.attrs.items():
                if key not in self.read and not key.startswith("__") and key not in HARMLESS:
                    if text not in ("None", "False", "()", "[]", *DEFAULTS.get(key, ())):
                        raise ValueError(f"{key}={text!r} is not supported")
        except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError) as error:
            raise refuse(self.op, self.title, " ".join(str(error).split())) from None
        return code

    def create(self, layer: str, *names: str) -> str:
        """Set the layer's code and state. Returns an expression that refers to the layer. names: PyTorch's names of the
        layer's parameters."""
        self.layer = layer
        self.state = {f"{self.name}.{name}": array for name, array in zip(names, self.arrays)}
        return f"self.{self.name}"

    # The graph file stores attributes as text. The next methods convert them, and raise SyntaxError or ValueError if a
    # value is not supported.

    def value(self, key: str, default: Any = ...) -> Any:
        """A bool, an int, a finite float, or a tuple of ints and Nones. If the value is None, returns default."""
        self.read.add(key)
        text = self.attrs.get(key, "None")
        if text == "None":
            if default is ...:
                raise ValueError(f"{key} is missing")
            return default
        value: Any = ast.literal_eval({"true": "True", "false": "False"}.get(text, text.replace("L", "")))  # (2L, 2L)
        value = tuple(value) if isinstance(value, list) else value
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not (type(number) in (bool, int, float) and math.isfinite(number)):
                raise ValueError(f"{key}={text!r} is not supported")
        if key == "scalar" and value == int(value) and self.flag("is_int"):
            return int(value)
        return value

    def word(self, key: str, *words: str) -> str:
        """One of these words; the first one is the default."""
        self.read.add(key)
        word = self.attrs.get(key, words[0])
        if word not in words:
            raise ValueError(f"{key}={word!r} is not supported")
        return word

    def flag(self, key: str, default: bool = False) -> bool:
        self.read.add(key)
        return self.attrs.get(key, str(default)) in TRUE

    def sizes(self, key: str, default: Shape = ()) -> Shape:
        value = self.value(key, default)
        return value if isinstance(value, tuple) else (value,)

    def axes(self, key: str = "axis") -> Shape:
        """The axes, counted from 0, that a reduction removes."""
        axes = tuple(axis % self.rank for axis in self.sizes(key)) or tuple(range(self.rank))
        return tuple(sorted(set(range(self.rank)) - set(axes))) if self.flag("exclude") else axes

    def size(self, x: str, axis: int) -> int | str:
        """The size of an axis of the first input, whose code is x: a number if it is the same for all samples."""
        sizes = {shape[axis] for shape in self.inputs[0]}
        return sizes.pop() if len(sizes) == 1 else f"{x}.shape[{axis}]"

    def shape(self, *inputs: str) -> list[int | str]:
        """The output's shape as code: a number if it is the same for all samples, otherwise a size of an input, or a
        product of several sizes.

        Any other size is written as -1.
        """
        names = [f"{x}.shape[{i}]" for x, shapes in zip(inputs, self.inputs) for i in range(len(shapes[0]))]
        sizes = np.concatenate([np.transpose(shapes) for shapes in self.inputs])  # a row for each name
        result = list[int | str]()
        for column in zip(*self.outputs[0]):
            if len(set(column)) == 1:
                result.append(column[0])
                continue
            spans = [(k, k + n) for n in range(1, len(names) + 1) for k in range(len(names) - n + 1)]
            equal = [(k, end) for k, end in spans if np.array_equal(sizes[k:end].prod(axis=0), column)]
            if equal:
                start, end = equal[0]
                result.append(" * ".join(names[start:end]))
                names, sizes = names[end:], sizes[end:]  # axes keep their order
            else:
                result.append(-1)
        return result


class _Template(string.Formatter):
    """Replaces {0} by the first input, {axis} by an attribute, and {axis:-1} by an attribute with a default."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return args[key] if isinstance(key, int) else functools.partial(self.node.value, key)

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, str):
            return value
        return repr(value(ast.literal_eval(spec)) if spec else value())


# Layers: operators with parameters


def convolution(node: Node, x: str) -> str:
    kernel = node.sizes("kernel")
    if any(node.sizes("target_shape")):
        raise ValueError("target_shape is not supported")
    groups, transposed = node.value("num_group", 1), node.op == "Deconvolution"
    channels = node.arrays[0].shape[0], node.arrays[0].shape[1] * groups
    layer = call(
        f"nn.Conv{'Transpose' * transposed}{len(kernel)}d",
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
    return call(layer, f"{x}.flatten(1)" if node.flag("flatten", True) and node.rank > 2 else x)


def batch_norm(node: Node, x: str) -> str:
    if node.value("axis", 1) % node.rank != 1:
        raise ValueError("axis must be 1")
    eps = node.value("eps", 1e-3)
    momentum = float(f"{1 - node.value('momentum', 0.9):.6g}")  # PyTorch's momentum is the weight of the new value
    layer = call(f"nn.BatchNorm{max(node.rank - 2, 1)}d", len(node.arrays[0]), eps=eps, momentum=momentum)
    name = node.create(layer, "weight", "bias", "running_mean", "running_var")
    node.frozen = node.flag("fix_gamma", True)
    if node.flag("use_global_stats"):
        state = (f"{name}.{key}" for key in ("running_mean", "running_var", "weight", "bias"))
        return call("F.batch_norm", x, *state, eps=eps)
    return call(name, x)


def layer_norm(node: Node, x: str) -> str:
    if node.value("axis", -1) % node.rank != node.rank - 1:
        raise ValueError("axis must be -1")
    layer = call("nn.LayerNorm", len(node.arrays[0]), eps=node.value("eps", 1e-5))
    return call(node.create(layer, "weight", "bias"), x)


def instance_norm(node: Node, x: str) -> str:
    layer = call(f"nn.InstanceNorm{node.rank - 2}d", len(node.arrays[0]), eps=node.value("eps", 1e-3), affine=True)
    return call(node.create(layer, "weight", "bias"), x)


def group_norm(node: Node, x: str) -> str:
    groups = node.value("num_groups", 1)
    layer = node.create(call("nn.GroupNorm", groups, groups, eps=node.value("eps", 1e-5)), "weight", "bias")
    # MXNet has one weight per group; PyTorch has one per channel. So each group becomes one channel.
    return f"{layer}({x}.unflatten(1, ({groups}, -1))).flatten(1, 2)"


def embedding(node: Node, x: str) -> str:
    layer = node.create(call("nn.Embedding", *node.arrays[0].shape), "weight")
    return call(layer, f"{x}.long().clamp(0, {len(node.arrays[0]) - 1})")


def leaky_relu(node: Node, x: str) -> str:
    kind, slope = node.word("act_type", "leaky", "elu", "selu", "gelu", "prelu"), node.value("slope", 0.25)
    if kind == "prelu":
        return call(node.create(call("nn.PReLU", node.arrays[0].size), "weight"), x)
    if kind == "leaky":
        return call("F.leaky_relu", x, negative_slope=slope)
    return call(f"F.{kind}", x, alpha=slope if kind == "elu" else None)


def rnn(node: Node, x: str, *states: str) -> str:
    kind = node.word("mode", "lstm", "gru", "rnn_tanh", "rnn_relu")
    size, layers = node.value("state_size"), node.value("num_layers")
    inputs, gates, dropout = node.inputs[0][0][2], {"lstm": 4, "gru": 3}.get(kind, 1), node.value("p", 0.0)
    directions = ("", "_reverse") if node.flag("bidirectional") else ("",)
    layer = call(
        "nn.RNN" if kind.startswith("rnn") else f"nn.{kind.upper()}",
        inputs,
        size,
        num_layers=_unless(1, layers),
        nonlinearity="'relu'" if kind == "rnn_relu" else None,
        dropout=dropout if dropout and layers > 1 else None,
        bidirectional=_unless(False, len(directions) == 2),
    )
    # MXNet stores all parameters in one array: first the weights of all layers, then the biases
    shapes: dict[str, Shape] = {}
    for i in range(layers):
        for direction in directions:
            shapes[f"weight_ih_l{i}{direction}"] = (gates * size, len(directions) * size if i else inputs)
            shapes[f"weight_hh_l{i}{direction}"] = (gates * size, size)
    shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(node.arrays[0], ends[:-1])
    node.arrays = [part.reshape(shape) for part, shape in zip(parts, shapes.values())]
    node.nested = True
    return call(node.create(layer, *shapes), x, *([f"({', '.join(states)})"] if len(states) > 1 else states))


# Other operators


def activation(node: Node, x: str) -> str:
    kind = node.word("act_type", "relu", "sigmoid", "tanh", "softrelu", "softsign")
    return call({"softrelu": "F.softplus", "softsign": "F.softsign"}.get(kind, f"torch.{kind}"), x)


def pooling(node: Node, x: str) -> str:
    n, kind = node.rank - 2, node.word("pool_type", "max", "avg")
    if node.flag("global_pool"):
        node.read |= set(node.attrs) - {"layout"}
        return call(f"F.adaptive_{kind}_pool{n}d", x, 1)
    kernel, stride, pads = node.sizes("kernel"), node.sizes("stride", (1,) * n), node.sizes("pad", (0,) * n)
    full = node.word("pooling_convention", "valid", "full") == "full"
    includes_pad = node.flag("count_include_pad", True)
    pool = {"kernel_size": _short(kernel), "stride": _unless(_short(kernel), _short(stride))}
    if not full or all(s + p <= k for k, s, p in zip(kernel, stride, pads)):
        pool |= {"padding": _unless(0, _short(pads)), "ceil_mode": _unless(False, full)}
        return call(f"F.{kind}_pool{n}d", x, **pool, count_include_pad=_unless(True, includes_pad or kind == "max"))
    # Unlike PyTorch, MXNet also has windows that start after the last pixel. So the image is padded to hold them.
    axes = reversed(list(zip(kernel, stride, pads, range(2, node.rank))))
    widths = ", ".join(f"{p}, {p + s - 1} - ({x}.shape[{i}] + {2 * p - k + s - 1}) % {s}" for k, s, p, i in axes)
    if kind == "max":
        return call(f"F.max_pool{n}d", call("F.pad", x, f"({widths})", value=LOWEST), **pool)
    if includes_pad and any(pads):
        raise ValueError("pooling_convention='full' is not supported for this kernel, stride and pad")
    sums, counts = (call("F.pad", values, f"({widths})") for values in (x, f"torch.ones_like({x})"))
    return f"{call(f'F.avg_pool{n}d', sums, **pool)} / {call(f'F.avg_pool{n}d', counts, **pool)}.clamp(min=1e-6)"


def resize(node: Node, x: str, *like: str) -> str:
    node.read |= {"height", "width", "scale_height", "scale_width"}
    node.word("mode", "size", "like")
    size = f"{like[0]}.shape[2:]" if like else f"({', '.join(map(str, node.shape(x)[2:]))})"
    return call("F.interpolate", x, size=size, mode="'bilinear'", align_corners=node.flag("align_corners", True))


def pad(node: Node, x: str) -> str:
    mode = {"constant": None, "edge": "'replicate'", "reflect": "'reflect'"}[
        node.word("mode", "constant", "edge", "reflect")
    ]
    widths = node.sizes("pad_width")  # two widths per axis; F.pad expects the last axis first
    widths = tuple(w for i in range(len(widths) - 2, 3 if mode else -1, -2) for w in widths[i : i + 2])
    return call("F.pad", x, widths, mode=mode, value=_unless(0.0, node.value("constant_value", 0.0)))


def reshape(node: Node, x: str, *like: str) -> str:
    node.read |= {"shape", "newshape", "reverse", "order", "lhs_begin", "lhs_end", "rhs_begin", "rhs_end"}
    sizes = node.shape(x, *like)
    computed = [size for size in sizes if isinstance(size, str)]
    if sizes.count(-1) > 1:
        raise ValueError("more than one size is computed from the sizes of its input")
    if computed and -1 not in sizes and (len(computed) == 1 or "*" in computed[-1]):
        sizes[sizes.index(computed[-1])] = -1
    return call(f"{x}.reshape", *sizes)


def zeros(node: Node, x: str) -> str:
    node.read.add("shape")
    return call(f"{x}.new_{'ones' if 'ones' in node.op else 'zeros'}", *node.shape(x))


def transpose(node: Node, x: str) -> str:
    return call(f"{x}.permute", *(node.sizes("axes") or tuple(range(node.rank))[::-1]))


def index(*parts: Iterable[int | str | None]) -> str:
    """The code for an index such as [:, 1:3]. parts: the start, stop and step of each axis."""
    words = []
    for part in parts:
        start, stop, step = (*part, None, None, None)[:3]
        text = f"{'' if start in (None, 0) else start}:{'' if stop is None else stop}"
        words.append(text if step in (None, 1) else f"{text}:{step}")
    while words and words[-1] == ":":
        words.pop()
    return f"[{', '.join(words)}]" if words else ""


def slices(node: Node, x: str) -> str:
    begin, end = node.sizes("begin"), node.sizes("end")
    step = node.sizes("step") or (None,) * len(begin)
    if any(size is not None and size < 0 for size in step):
        raise ValueError(f"step={step} is not supported")
    return x + index(*zip(begin, end, step))


def slice_axis(node: Node, x: str) -> str:
    axis = node.value("axis") % node.rank
    return x + index(*[()] * axis, (node.value("begin"), node.value("end", None)))


def slice_like(node: Node, x: str, like: str) -> str:
    axes = [axis % node.rank for axis in node.sizes("axes", tuple(range(node.rank)))]
    return x + index(*((0, f"{like}.shape[{i}]") if i in axes else () for i in range(max(axes) + 1)))


def split(node: Node, x: str) -> str:
    axis = node.value("axis", 1 if node.op == "SliceChannel" else 0) % node.rank
    node.read |= {"num_outputs", "sections", "indices", "indices_or_sections"}
    squeeze = node.flag("squeeze_axis")
    if len(node.outputs) == 1:
        return call(f"{x}.squeeze", axis) if squeeze else x
    if squeeze:
        return call(f"{x}.unbind", axis)
    sizes = [shapes[0][axis] for shapes in node.outputs]
    if any(len({shape[axis] for shape in shapes}) > 1 for shapes in node.outputs):
        return call(f"{x}.chunk", len(sizes), axis)
    return call(f"{x}.split", sizes[0] if len(set(sizes)) == 1 else sizes, axis)


def concat(node: Node, *inputs: str) -> str:
    axis = node.value("dim", 1) if node.op == "Concat" else node.value("axis", 0)
    return call("torch.stack" if "stack" in node.op else "torch.cat", f"[{', '.join(inputs)}]", dim=axis)


def squeeze(node: Node, x: str) -> str:
    axes = node.sizes("axis")
    return call(f"{x}.reshape", *node.shape(x)) if not axes else call(f"{x}.squeeze", _short(axes))


def repeat(node: Node, x: str) -> str:
    axis = node.value("axis", None)
    source = x if axis is not None else f"{x}.flatten()"
    return call(f"{source}.repeat_interleave", node.value("repeats"), 0 if axis is None else axis)


def expand(node: Node, x: str, *like: str) -> str:
    node.read |= {"shape", "axis", "size", "lhs_axes", "rhs_axes"}
    return call(f"{x}.expand", *node.shape(x, *like))


def depth_to_space(node: Node, x: str) -> str:
    b, (n, c, h, w) = node.value("block_size"), (f"{x}.shape[{i}]" for i in range(4))
    if node.op == "depth_to_space":
        blocks = f"{call(f'{x}.reshape', n, b, b, -1, h, w)}.permute(0, 3, 4, 1, 5, 2)"
        return call(f"{blocks}.reshape", n, -1, f"{h} * {b}", f"{w} * {b}")
    blocks = f"{call(f'{x}.reshape', n, c, f'{h} // {b}', b, f'{w} // {b}', b)}.permute(0, 3, 5, 1, 2, 4)"
    return call(f"{blocks}.reshape", n, -1, f"{h} // {b}", f"{w} // {b}")


def softmax(node: Node, x: str) -> str:
    if node.op == "SoftmaxActivation":
        if node.word("mode", "instance", "channel") == "instance" and node.rank > 2:
            raise ValueError("mode='instance' is not supported for more than two axes")
        return call("F.softmax", x, dim=1)
    temperature = node.value("temperature", 1.0)
    function = "log_softmax" if node.op == "log_softmax" else "softmax"
    return call(f"F.{function}", x if temperature == 1 else f"{x} / {temperature!r}", dim=node.value("axis", -1))


def cast(node: Node, x: str) -> str:
    return call(f"{x}.to", f"torch.{node.word('dtype', *DTYPES)}")


def reduction(function: str) -> Callable[..., str]:
    """A rule for an operator that reduces axes. function: its name in PyTorch."""

    def rule(node: Node, x: str) -> str:
        axes = node.axes()
        if function == "prod" and len(axes) > 1:
            raise ValueError(f"the product over axes {axes} is not supported")
        code = call(
            f"torch.{function}",
            x,
            ord=_unless(2, node.value("ord", 2)),
            dim=_short(axes),
            keepdim=_unless(False, node.flag("keepdims")),
            correction=_unless(1, node.value("ddof", 0)) if function in ("std", "var") else None,
        )
        to_scalar = len(axes) == node.rank and not node.flag("keepdims")
        return f"{code}.reshape(1)" if to_scalar and node.outputs[0][0] == (1,) else code

    return rule


def arg_reduction(node: Node, x: str) -> str:
    function = "argmin" if "argmin" in node.op else "argmax"
    axis = 1 if node.op == "argmax_channel" else node.value("axis")
    code = call(f"{x}.{function}", axis, keepdim=_unless(False, node.flag("keepdims")))
    return code if node.op.startswith("_npi") else f"{code}.to({x}.dtype)"


def topk(node: Node, x: str) -> str:
    result = 1 if node.word("ret_typ", "indices", "value") == "indices" else 0
    largest = _unless(True, not node.flag("is_ascend"))
    code = f"{call(f'{x}.topk', node.value('k', 1), node.value('axis', -1), largest=largest)}[{result}]"
    return f"{code}.to({x}.dtype)" if result else code


def smooth_l1(node: Node, x: str) -> str:
    bend = node.value("scalar", 1.0) ** -2
    return f"torch.where({x}.abs() > {bend!r}, {x}.abs() - {bend / 2!r}, {0.5 / bend!r} * {x}.square())"


def l2_normalization(node: Node, x: str) -> str:
    first, end = {"instance": (1, node.rank), "channel": (1, 2), "spatial": (2, node.rank)}[
        node.word("mode", "instance", "channel", "spatial")
    ]
    total = call(f"{x}.square().sum", _short(tuple(range(first, end))), keepdim=True)
    return f"{x} / ({total} + {node.value('eps', 1e-10)!r}).sqrt()"


def matrix_product(node: Node, a: str, b: str) -> str:
    if node.op == "dot" and (node.rank > 2 or len(node.inputs[1][0]) > 2):
        return call("torch.tensordot", a, b, dims=1)
    left = f"{a}.transpose(-2, -1)" if node.flag("transpose_a") else a
    right = f"{b}.transpose(-2, -1)" if node.flag("transpose_b") else b
    alpha = node.value("alpha", 1.0)
    return f"{left} @ {right}" if alpha == 1 else f"{alpha!r} * ({left} @ {right})"


def in_range(node: Node, indices: str, size: int | str) -> str:
    """The code for integer indices, which MXNet does not expect to be in range."""
    last = size - 1 if isinstance(size, int) else f"{size} - 1"
    return (
        f"{indices}.long() % {size}"
        if node.word("mode", "clip", "wrap") == "wrap"
        else f"{indices}.long().clamp(0, {last})"
    )


def take(node: Node, x: str, indices: str) -> str:
    axis = node.value("axis", 0) % node.rank
    return f"{x}[{':, ' * axis}{in_range(node, indices, node.size(x, axis))}]"


def pick(node: Node, x: str, indices: str) -> str:
    axis, keep = node.value("axis", -1), node.flag("keepdims")
    positions = in_range(
        node, indices if len(node.inputs[1][0]) == node.rank else f"{indices}.unsqueeze({axis})", node.size(x, axis)
    )
    code = call(f"{x}.gather", axis, positions)
    return code if keep else call(f"{code}.squeeze", axis)


def one_hot(node: Node, x: str) -> str:
    on, off = node.value("on_value", 1.0), node.value("off_value", 0.0)
    code = f"({x}.long().unsqueeze(-1) == torch.arange({node.value('depth')!r}, device={x}.device)).float()"
    return code if (on, off) == (1, 0) else f"{code} * {on - off!r} + {off!r}"


LAYERS: dict[str, Callable[..., str]] = {
    **dict.fromkeys(("Convolution", "Deconvolution"), convolution),
    "FullyConnected": fully_connected,
    **dict.fromkeys(("BatchNorm", "_contrib_SyncBatchNorm"), batch_norm),
    "LayerNorm": layer_norm,
    "InstanceNorm": instance_norm,
    "GroupNorm": group_norm,
    "Embedding": embedding,
    "LeakyReLU": leaky_relu,
    "RNN": rnn,
}

UNARY = {
    **{
        name: f"torch.{name}"
        for name in """abs ceil cos cosh erf erfinv exp expm1 floor log log10 log1p log2
        reciprocal relu rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc""".split()
    },
    **{f"arc{name}": f"torch.a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh")},
    "absolute": "torch.abs",
    "degrees": "torch.rad2deg",
    "fix": "torch.trunc",
    "gammaln": "torch.lgamma",
    "negative": "torch.neg",
    "radians": "torch.deg2rad",
    "softsign": "F.softsign",
    "zeros_like": "torch.zeros_like",
    "ones_like": "torch.ones_like",
}
ARITHMETIC = {
    **dict.fromkeys(("add", "plus", "_grad_add"), "{0} + {1}"),
    **dict.fromkeys(("sub", "minus", "subtract"), "{0} - {1}"),
    **dict.fromkeys(("mul", "multiply"), "{0} * {1}"),
    **dict.fromkeys(("div", "true_divide"), "{0} / {1}"),
    "mod": "torch.where({1} == 0, 0, {0} % {1})",
    "power": "{0} ** {1}",
    "maximum": "torch.maximum({0}, {1})",
    "minimum": "torch.minimum({0}, {1})",
    "hypot": "({0} * {0} + {1} * {1}).sqrt()",
}
COMPARISONS = {
    "equal": "==",
    "not_equal": "!=",
    "greater": ">",
    "greater_equal": ">=",
    **dict.fromkeys(("lesser", "less"), "<"),
    **dict.fromkeys(("lesser_equal", "less_equal"), "<="),
}
REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin", "prod": "prod", "std": "std", "var": "var"}
PREFIXES = ("", "_", "broadcast_", "elemwise_", "_np_", "_npi_", "_npx_")
BINARY = {
    **{f"{prefix}{name}": code for prefix in PREFIXES for name, code in ARITHMETIC.items()},
    # Outside mx.np, the result of a comparison has the type of its first input.
    **{f"{p}{name}": f"({{0}} {sign} {{1}}).to({{0}}.dtype)" for p in PREFIXES for name, sign in COMPARISONS.items()},
    **{f"_npi_{name}": f"{{0}} {sign} {{1}}" for name, sign in COMPARISONS.items()},
}

OPERATORS: dict[str, str | Callable[..., str]] = {
    **LAYERS,
    **{f"{prefix}{name}": f"{code}({{0}})" for prefix in PREFIXES for name, code in UNARY.items()},
    **BINARY,
    **{f"{name}_scalar": code.format("{0}", "{scalar}") for name, code in BINARY.items()},
    **{f"{p}r{name}_scalar": code.format("{scalar}", "{0}") for p in PREFIXES for name, code in ARITHMETIC.items()},
    **{f"{prefix}{name}": reduction(code) for prefix in PREFIXES for name, code in REDUCTIONS.items()},
    **dict.fromkeys(("_mod_scalar", "_npi_mod_scalar"), "{0} % {scalar}"),
    **dict.fromkeys(("_rpower_scalar", "_npi_rpower_scalar"), "torch.pow({scalar}, {0})"),  # -2.0 ** x is -(2.0 ** x)
    **dict.fromkeys(("_maximum_scalar", "_npi_maximum_scalar"), "{0}.clamp(min={scalar})"),
    **dict.fromkeys(("_minimum_scalar", "_npi_minimum_scalar"), "{0}.clamp(max={scalar})"),
    **dict.fromkeys(("_copy", "_np_copy", "BlockGrad", "MakeLoss", "make_loss", "identity", "amp_cast"), "{0}"),
    # torch.round rounds halves to even numbers, MXNet's round away from zero, and its rint down
    "round": "torch.trunc(2 * {0} - torch.trunc({0}))",
    **dict.fromkeys(("rint", "_npi_rint"), "torch.where({0} - {0}.floor() <= 0.5, {0}.floor(), {0}.ceil())"),
    "hard_sigmoid": "({0} * {alpha:0.2} + {beta:0.5}).clamp(0, 1)",
    "smooth_l1": smooth_l1,
    "_contrib_div_sqrt_dim": "{0} / {0}.shape[-1] ** 0.5",
    "logical_not": "({0} == 0).to({0}.dtype)",
    "broadcast_logical_and": "(({0} != 0) & ({1} != 0)).to({0}.dtype)",
    "broadcast_logical_or": "(({0} != 0) | ({1} != 0)).to({0}.dtype)",
    "broadcast_logical_xor": "(({0} != 0) ^ ({1} != 0)).to({0}.dtype)",
    **dict.fromkeys(("clip", "_npi_clip"), "{0}.clamp({a_min}, {a_max})"),
    **dict.fromkeys(("where", "_npi_where"), "torch.where({0} != 0, {1}, {2})"),
    "Activation": activation,
    "Pooling": pooling,
    "_contrib_AdaptiveAvgPooling2D": "F.adaptive_avg_pool2d({0}, {output_size:1})",
    "_contrib_BilinearResize2D": resize,
    "UpSampling": "F.interpolate({0}, scale_factor={scale})",
    "LRN": "F.local_response_norm({0}, {nsize}, {alpha:1e-4}, {beta:0.75}, {knorm:2.0})",
    "L2Normalization": l2_normalization,
    "Dropout": "F.dropout({0}, {p:0.5}, self.training)",
    **dict.fromkeys(("softmax", "log_softmax", "SoftmaxActivation"), softmax),
    **dict.fromkeys(("dot", "batch_dot", "_linalg_gemm2", "_npi_matmul", "_np_dot"), matrix_product),
    **dict.fromkeys(("argmax", "argmin", "argmax_channel", "_npi_argmax", "_npi_argmin"), arg_reduction),
    "topk": topk,
    "norm": reduction("linalg.vector_norm"),
    **dict.fromkeys(("cumsum", "_np_cumsum"), "{0}.cumsum({axis})"),
    "add_n": lambda node, *inputs: " + ".join(inputs),
    "Pad": pad,
    "Flatten": "{0}.flatten(1)",
    **dict.fromkeys(("Reshape", "_np_reshape", "_npi_reshape", "_npx_reshape", "reshape_like"), reshape),
    "expand_dims": "{0}.unsqueeze({axis})",
    **dict.fromkeys(("squeeze", "_np_squeeze"), squeeze),
    **dict.fromkeys(("transpose", "_np_transpose"), transpose),
    "SwapAxis": "{0}.transpose({dim1:0}, {dim2:0})",
    **dict.fromkeys(("slice", "_npi_slice"), slices),
    "slice_axis": slice_axis,
    "slice_like": slice_like,
    **dict.fromkeys(("SliceChannel", "_split_v2", "_npi_split"), split),
    **dict.fromkeys(("Concat", "_npi_concatenate", "stack", "_npi_stack"), concat),
    **dict.fromkeys(("tile", "_npi_tile"), "torch.tile({0}, {reps})"),
    **dict.fromkeys(("repeat", "_np_repeat"), repeat),
    **dict.fromkeys(("reverse", "_npi_flip"), "{0}.flip({axis})"),
    **dict.fromkeys(("broadcast_to", "broadcast_like", "broadcast_axis", "_npi_broadcast_to"), expand),
    **dict.fromkeys(("depth_to_space", "space_to_depth"), depth_to_space),
    **dict.fromkeys(("_zeros", "_ones", "_npi_zeros", "_npi_ones"), zeros),
    **dict.fromkeys(("Cast", "_npi_cast"), cast),
    **dict.fromkeys(("take", "_npi_take"), take),
    "pick": pick,
    "one_hot": one_hot,
    "_contrib_arange_like": "torch.arange({0}.shape[{axis}], device={0}.device).float()",
    "SequenceLast": "{0}.select({axis:0}, -1)",
}
