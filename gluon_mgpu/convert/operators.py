"""Generates PyTorch code for MXNet's operators, from a template or with a function for each kind of operator.

The graph comes from a file, and the generated code is executed. For safety, the code contains nothing from the file
except identifiers and numbers: `call` and templates write values with repr, and all strings passed to them are
identifiers or come from this package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Union

import numpy as np

from gluon_mgpu.convert.exported import Shape, Unsupported
from gluon_mgpu.convert.registry import attributes, parse, simple

Rule = Union[str, Callable[..., str]]
LOWEST = float(np.finfo(np.float32).min)
# Attributes that change no operator's result, or that the shapes of its parameters and outputs imply. Those that only
# some operators can ignore are in their rules.
HARMLESS = """cast_narrow ctx cudnn_off cudnn_tune grad_scale input_dim is_int key max_calib_range min_calib_range ndev
    no_bias normalization num_args num_filter num_hidden num_outputs optimize output_dim sparse_grad state_outputs stype
    valid_thresh workspace""".split()
# What `reshape` and `expand` need not read, because they use the shapes of their inputs and outputs
RESHAPED = """axis keep_highest lhs_axes lhs_begin lhs_end newshape order reverse rhs_axes rhs_begin rhs_end shape size
    target_shape""".split()
LAYOUTS = ("NCW", "NCHW", "NCDHW")


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
    """An operator of the graph, and its layer in PyTorch if it has one. node["axis"] is the value of an attribute."""

    op: str
    attrs: dict[str, str]
    inputs: list[list[Shape]]  # the shape of each input that is not a layer's parameter, for each sample
    outputs: list[list[Shape]]  # the shape of each output, for each sample
    arrays: list[np.ndarray]  # values of the layer's parameters
    layer: str = ""  # the code that creates the layer
    state: dict[str, np.ndarray] = field(default_factory=dict)  # the layer's part of the state dict
    evaluated: bool = False  # whether the layer is always in evaluation mode
    nested: bool = False  # whether the layer returns (output, state)
    read: set[str] = field(default_factory=set)  # the attributes that were used

    @property
    def kind(self) -> str:
        return simple(self.op)

    @property
    def rank(self) -> int:
        return len(self.inputs[0][0])

    def code(self, *inputs: str) -> str:
        """Generate code that applies the operator to inputs, which are expressions.

        Raises Unsupported if the operator cannot be converted.
        """
        try:
            rule = find_rule(self.op)
            if rule is None:
                raise Unsupported(reason(self.op), fixed_size=self.op == "_contrib_MultiBoxPrior")
            if isinstance(rule, str):  # {0} is the first input, and {axis} an attribute
                code = rule.format(*inputs, **{key: repr(self[key]) for key in re.findall(r"{([a-z]\w*)}", rule)})
            else:
                code = rule(self, *inputs)
            known = attributes(self.op)
            for key, text in self.attrs.items():
                if key in known and key not in self.read and key not in HARMLESS:
                    kind, default = known[key]
                    if parse(kind, text) != parse(kind, default):
                        raise Unsupported(f"{key}={text!r} is not supported")
        except Unsupported:
            raise
        except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError):
            raise Unsupported("this use of the operator is not supported") from None
        return code

    def create(self, layer: str, *names: str) -> str:
        """Set the layer's code and state. Returns the code that stands for the layer. names: PyTorch's names of the
        layer's parameters."""
        self.layer, self.state = layer, dict(zip(names, self.arrays))
        return "self.layer"

    def __getitem__(self, key: str) -> Any:
        """An attribute's value, or MXNet's default. Raises Unsupported if it is missing or not of MXNet's type."""
        self.read.add(key)
        kind, default = attributes(self.op)[key]
        text = self.attrs.get(key, default)
        if not text:
            raise Unsupported(f"{key} is missing")
        try:
            value = parse(kind, text)
        except (SyntaxError, ValueError):
            raise Unsupported(f"{key}={text!r} is not supported") from None
        return int(value) if key == "scalar" and "is_int" in self and value == int(value) and self["is_int"] else value

    def __contains__(self, key: str) -> bool:
        """Whether the operator has this attribute."""
        return key in attributes(self.op)

    def word(self, key: str, *words: str | int | None) -> Any:
        """An attribute's value, which must be one of these words."""
        if self[key] not in words:
            raise Unsupported(f"{key}={self[key]!r} is not supported")
        return self[key]

    def sizes(self, key: str, default: int) -> Shape:
        """One size for each axis of a convolution or pooling."""
        return self[key] or (default,) * len(self["kernel"])

    def axes(self, key: str = "axis") -> Shape:
        """The axes, counted from 0, that a reduction removes."""
        value = self[key]
        value = value if isinstance(value, tuple) else () if value is None else (value,)
        axes = tuple(axis % self.rank for axis in value) or tuple(range(self.rank))
        excluded = "exclude" in self and self["exclude"]
        return tuple(sorted(set(range(self.rank)) - set(axes))) if excluded else axes

    def to_dtype(self, code: str) -> str:
        """Convert the result to the attribute dtype. float32 stands for any type of floating-point numbers."""
        return f"{code}.float()" if self["dtype"] == "float32" else f"{code}.to(torch.{self['dtype']})"

    def size(self, x: str, axis: int) -> int | str:
        """The size of an axis of the first input, whose code is x: a number if it is the same for all samples."""
        sizes = {shape[axis] for shape in self.inputs[0]}
        return sizes.pop() if len(sizes) == 1 else f"{x}.shape[{axis}]"

    def shape(self, *inputs: str) -> list[int | str]:
        """The output's shape as code: a number if it is the same for all samples, otherwise computed from the sizes of
        the inputs.

        A size that is not a product, a multiple or a fraction of their sizes is written as -1.
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
                continue
            ratios = [(k, column[0] // size[0], size[0] // column[0]) for k, size in enumerate(sizes)]
            scaled = [(k, f"{names[k]} * {by}") for k, by, _ in ratios if np.array_equal(sizes[k] * by, column)]
            scaled += [
                (k, f"{names[k]} // {by}") for k, _, by in ratios if by and np.array_equal(sizes[k] // by, column)
            ]
            result.append(scaled[0][1] if scaled else -1)
            if scaled:
                names, sizes = names[scaled[0][0] + 1 :], sizes[scaled[0][0] + 1 :]
        return result


# Layers: operators with parameters


def convolution(node: Node, x: str, *weights: str) -> str:
    """weights: the code of the weight and the bias if they are computed from the network's input."""
    n, groups, transposed = len(node["kernel"]), node["num_group"], node.kind == "deconvolution"
    node.word("layout", None, *LAYOUTS)
    if transposed and any(node["target_shape"]):
        raise Unsupported("MXNet cannot compute target_shape on CPUs; set pad and adj instead")
    options = {
        "stride": _short(node.sizes("stride", 1)),
        "padding": _short(node.sizes("pad", 0)),
        "output_padding": _short(node.sizes("adj", 0)) if transposed else None,
        "dilation": _short(node.sizes("dilate", 1)),
        "groups": groups,
    }
    if weights:
        return call(f"F.conv{'_transpose' * transposed}{n}d", x, *weights, **options)
    channels = node.arrays[0].shape[0], node.arrays[0].shape[1] * groups
    layer = call(
        f"nn.Conv{'Transpose' * transposed}{n}d",
        *(channels if transposed else channels[::-1]),
        kernel_size=_short(node["kernel"]),
        **options,
        bias=len(node.arrays) == 2,
    )
    return call(node.create(layer, "weight", "bias"), x)


def fully_connected(node: Node, x: str, *weights: str) -> str:
    rows = f"{x}.flatten(1)" if node["flatten"] and node.rank > 2 else x
    if weights:
        return call("F.linear", rows, *weights)
    units, inputs = node.arrays[0].shape
    layer = node.create(call("nn.Linear", inputs, units, bias=_unless(True, len(node.arrays) == 2)), "weight", "bias")
    return call(layer, rows)


def batch_norm(node: Node, x: str) -> str:
    axis, eps = node["axis"] % node.rank if "axis" in node else 1, node["eps"]
    momentum = float(f"{1 - node['momentum']:.6g}")  # PyTorch's momentum is the weight of the new value
    options = {"eps": _unless(1e-5, eps), "momentum": _unless(0.1, momentum)}
    layer = call(f"nn.BatchNorm{max(node.rank - 2, 1)}d", len(node.arrays[0]), **options)
    name = node.create(layer, "weight", "bias", "running_mean", "running_var")
    node.read.add("fix_gamma")  # gamma is 1, and does not train
    node.evaluated = node["use_global_stats"]
    code = call(name, x if axis == 1 else f"{x}.movedim({axis}, 1)")
    code += "" if axis == 1 else f".movedim(1, {axis})"
    return f"{code}.relu()" if node.kind == "batchnormwithrelu" else code


def layer_norm(node: Node, x: str, *weights: str) -> str:
    axis, last = node["axis"] % node.rank, node.rank - 1
    moved = x if axis == last else f"{x}.movedim({axis}, {last})"
    if weights:
        code = call("F.layer_norm", moved, f"({node.size(x, axis)},)", *weights, eps=_unless(1e-5, node["eps"]))
    else:
        layer = call("nn.LayerNorm", len(node.arrays[0]), eps=_unless(1e-5, node["eps"]))
        code = call(node.create(layer, "weight", "bias"), moved)
    return code if axis == last else f"{code}.movedim({last}, {axis})"


def instance_norm(node: Node, x: str, *weights: str) -> str:
    if weights:
        return call("F.instance_norm", x, weight=weights[0], bias=weights[1], eps=node["eps"])
    layer = call(f"nn.InstanceNorm{node.rank - 2}d", len(node.arrays[0]), eps=node["eps"], affine=True)
    return call(node.create(layer, "weight", "bias"), x)


def group_norm(node: Node, x: str, *weights: str) -> str:
    groups = node["num_groups"]
    # MXNet has one weight per group; PyTorch has one per channel. So each group becomes one channel.
    rows = f"{x}.unflatten(1, ({groups}, -1))"
    if weights:
        return f"{call('F.group_norm', rows, groups, *weights, eps=node['eps'])}.reshape_as({x})"
    layer = node.create(call("nn.GroupNorm", groups, groups, eps=node["eps"]), "weight", "bias")
    return f"{layer}({rows}).reshape_as({x})"  # after flatten, PyTorch's exporter takes the batch size for a constant


def embedding(node: Node, x: str, *weights: str) -> str:
    node.read.add("dtype")
    count = node.inputs[1][0][0] if weights else len(node.arrays[0])
    indices = f"{x}.long().clamp(0, {count - 1})"
    if weights:
        return call("F.embedding", indices, *weights)
    return call(node.create(call("nn.Embedding", *node.arrays[0].shape), "weight"), indices)


def leaky_relu(node: Node, x: str, *slopes: str) -> str:
    kind, slope = node.word("act_type", "leaky", "elu", "selu", "gelu", "prelu", "rrelu"), node["slope"]
    node.read |= {"lower_bound", "upper_bound"}  # only rrelu uses them
    if kind == "prelu" and slopes:
        return call("F.prelu", x, *slopes)
    if kind == "prelu":
        return call(node.create(call("nn.PReLU", node.arrays[0].size), "weight"), x)
    if kind == "rrelu":
        del node.outputs[1:]  # the slopes
        return call("F.rrelu", x, node["lower_bound"], node["upper_bound"], "self.training")
    if kind == "leaky":
        return call("F.leaky_relu", x, negative_slope=slope) if slope else call("torch.relu", x)
    return call(f"F.{kind}", x, alpha=slope if kind == "elu" else None)


def rnn(node: Node, x: str, *states: str) -> str:
    kind = node["mode"]
    size, layers = node["state_size"], node["num_layers"]
    inputs, gates, dropout = node.inputs[0][0][2], {"lstm": 4, "gru": 3}.get(kind, 1), node["p"]
    directions = ("", "_reverse") if node["bidirectional"] else ("",)
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
    name, count = node.create(layer, *shapes), len(states) - node["use_sequence_length"]
    given = [f"({', '.join(states[:count])})"] if count > 1 else states[:count]
    return call("rnn_of_lengths", name, x, states[-1], *given) if node["use_sequence_length"] else call(name, x, *given)


# Other operators


def activation(node: Node, x: str) -> str:
    kind = node["act_type"]
    return call({"softrelu": "F.softplus", "softsign": "F.softsign"}.get(kind, f"torch.{kind}"), x)


def pooling(node: Node, x: str) -> str:
    n, kind = node.rank - 2, node.word("pool_type", "max", "avg", "sum", "lp")
    node.read.add("p_value")  # only lp uses it
    if kind == "lp" and node.word("p_value", 1, 2) == 1:
        kind = "sum"  # MXNet takes no absolute values
    node.word("layout", None, *LAYOUTS)
    if node["global_pool"]:
        node.read |= set(node.attrs)
        pixels = _short(tuple(range(2, node.rank)))
        if kind == "lp":
            return call("torch.linalg.vector_norm", x, 2, pixels, keepdim=True)
        return call(f"{x}.sum", pixels, keepdim=True) if kind == "sum" else call(f"F.adaptive_{kind}_pool{n}d", x, 1)
    kernel = node["kernel"]
    stride, pads = node.sizes("stride", 1), node.sizes("pad", 0)
    full = node.word("pooling_convention", "valid", "full") == "full"
    includes_pad = node["count_include_pad"] in (None, True)
    pool = {"kernel_size": _short(kernel), "stride": _unless(_short(kernel), _short(stride))}
    alike = kind in ("max", "avg") and all(2 * p <= k for k, p in zip(kernel, pads))
    if alike and (not full or all(s + p <= k for k, s, p in zip(kernel, stride, pads))):
        pool |= {"padding": _unless(0, _short(pads)), "ceil_mode": _unless(False, full)}
        return call(f"F.{kind}_pool{n}d", x, **pool, count_include_pad=_unless(True, includes_pad or kind == "max"))
    # PyTorch lacks large pads, and windows that start after the last pixel. So the image is padded before.
    axes = [*zip(kernel, stride, pads, range(2, node.rank))][::-1]
    ends = [f"{p + s - 1} - ({x}.shape[{i}] + {2 * p - k + s - 1}) % {s}" if full else str(p) for k, s, p, i in axes]
    widths = f"({', '.join(f'{p}, {end}' for (_, _, p, _), end in zip(axes, ends))})"

    def padded(values: str, **options: Any) -> str:
        return call("F.pad", values, widths, **options) if full or any(pads) else values

    if kind == "max":
        return call(f"F.max_pool{n}d", padded(x, value=LOWEST), **pool)
    if kind == "lp":
        return call(f"F.lp_pool{n}d", padded(x), 2, **pool)
    mean = call(f"F.avg_pool{n}d", padded(x), **pool)
    if kind == "sum":
        return f"{mean} * {math.prod(kernel)}"
    if includes_pad and not full:
        return mean
    if includes_pad and any(pads):
        raise Unsupported("pooling_convention='full' is not supported for this kernel, stride and pad")
    return f"{mean} / {call(f'F.avg_pool{n}d', padded(f'torch.ones_like({x})'), **pool)}.clamp(min=1e-6)"


# Sizes of BilinearResize2D. {0}: the image's size, {1}: multiplies it by the scale, such as " * 3 // 2"
RESIZED = {
    "size": "{0}{1}",
    "odd_scale": "{0} // 2 * 2{1} + {0} % 2",
    "to_even_down": "{0} // 2 * 2",
    "to_even_up": "({0} + 1) // 2 * 2",
    "to_odd_down": "({0} - 1) // 2 * 2 + 1",
    "to_odd_up": "{0} // 2 * 2 + 1",
}


def resize(node: Node, x: str, *like: str) -> str:
    mode, sizes = node["mode"], list[Any]()
    node.read |= {"height", "width"}  # only the mode size uses them
    for axis, key in ((2, "height"), (3, "width")):
        scale = node[f"scale_{key}"]
        if mode == "like":
            sizes.append(f"{like[0]}.shape[{axis}]")
        elif mode == "size" and scale is None:
            sizes.append(node[key])
        else:
            ratio = Fraction(scale or 1).limit_denominator(1000)
            by = "".join(f" {sign} {n}" for sign, n in zip(("*", "//"), ratio.as_integer_ratio()) if n != 1)
            sizes.append(RESIZED[mode].format(f"{x}.shape[{axis}]", by))
    options = {"mode": "'bilinear'", "align_corners": node["align_corners"]}
    return call("F.interpolate", x, size=f"({sizes[0]}, {sizes[1]})", **options)


def upsampling(node: Node, x: str, *others: str) -> str:
    scale = node["scale"]
    if node["sample_type"] == "bilinear":  # a transposed convolution, whose kernel is a parameter
        channels, kernel = node.arrays[0].shape[0], 2 * scale - scale % 2
        options = {"stride": scale, "padding": scale // 2, "groups": _unless(1, channels), "bias": False}
        node.read.add("multi_input_mode")
        return call(node.create(call("nn.ConvTranspose2d", channels, channels, kernel, **options), "weight"), x)
    first, *rest = node.inputs
    parts = [call("F.interpolate", x, scale_factor=scale)]
    for other, shapes in zip(others, rest):
        by = scale * first[0][2] // shapes[0][2]
        parts.append(other if by == 1 else call("F.interpolate", other, scale_factor=by))
    if node["multi_input_mode"] == "sum":
        return " + ".join(parts)
    return parts[0] if not others else f"torch.cat([{', '.join(parts)}], dim=1)"


def crop(node: Node, x: str, *like: str) -> str:
    sizes = [f"{like[0]}.shape[{axis}]" for axis in (2, 3)] if like else [str(size) for size in node["h_w"]]
    starts: list[str | int] = list(node["offset"])
    if node["center_crop"]:
        starts = [f"({x}.shape[{axis}] - {size}) // 2" for axis, size in zip((2, 3), sizes)]
    ends = [f"{start} + {size}" if start != 0 else size for start, size in zip(starts, sizes)]
    return x + index((), (), *zip(starts, ends))


def pad(node: Node, x: str) -> str:
    mode = {"constant": None, "edge": "'replicate'", "reflect": "'reflect'"}[node["mode"]]
    text = node.attrs["pad_width"]  # of mx.np: ((0, 0), (1, 2))
    widths = parse("tuple", re.sub(r"[()]", "", text)) if node.op == "_npi_pad" else node["pad_width"]
    node.read.add("pad_width")
    # two widths per axis; F.pad expects the last axis first
    widths = tuple(w for i in range(len(widths) - 2, 3 if mode else -1, -2) for w in widths[i : i + 2])
    while not mode and widths and not any(widths[-2:]):
        widths = widths[:-2]
    if not any(widths):
        return x
    return call("F.pad", x, widths, mode=mode, value=_unless(0.0, node["constant_value"]))


def reshape(node: Node, x: str, *like: str) -> str:
    node.read.update(RESHAPED)
    sizes = node.shape(x, *like)
    computed = [size for size in sizes if isinstance(size, str)]
    if sizes.count(-1) > 1:
        raise Unsupported("more than one size is computed from the sizes of its input", fixed_size=True)
    if computed and -1 not in sizes and (len(computed) == 1 or "*" in computed[-1]):
        sizes[sizes.index(computed[-1])] = -1
    return call(f"{x}.reshape", *sizes)


def index(*parts: Iterable[int | str | None] | str) -> str:
    """The code for an index such as [:, 1:3]. parts: the start, stop and step of each axis, or "..." for several."""
    words = []
    for part in parts:
        if part == "...":
            words.append(part)
            continue
        start, stop, step = (*part, None, None, None)[:3]
        text = f"{'' if start in (None, 0) else start}:{'' if stop is None else stop}"
        words.append(text if step in (None, 1) else f"{text}:{step}")
    while words[:1] != ["..."] and words and words[-1] == ":":
        words.pop()
    return f"[{', '.join(words)}]" if words else ""


def slices(node: Node, x: str) -> str:
    begin, end, step = node["begin"], node["end"], node["step"] or (None,) * len(node["begin"])
    parts, flipped = [], []
    for axis, (start, stop, by) in enumerate(zip(begin, end, step)):
        if by is not None and by < 0:  # PyTorch has no negative steps
            if any(at is not None and at >= 0 for at in (start, stop)):
                raise Unsupported("a negative step is only supported if begin and end count from the end")
            flipped.append(axis)
            start, stop = (None if at is None else -at - 1 for at in (start, stop))
        parts.append((start, stop, by and abs(by)))
    return (call(f"{x}.flip", *flipped) if flipped else x) + index(*parts)


def slice_like(node: Node, x: str, like: str) -> str:
    axes = [axis % node.rank for axis in node["axes"] or range(node.rank)]
    return x + index(*((0, f"{like}.shape[{i}]") if i in axes else () for i in range(max(axes) + 1)))


def split(node: Node, x: str) -> str:
    axis = node["axis"] % node.rank
    node.read |= {"indices", "sections"}  # the outputs have these sizes
    squeezed = "squeeze_axis" in node and node["squeeze_axis"]
    if len(node.outputs) == 1:
        return call(f"{x}.squeeze", axis) if squeezed else x
    if squeezed:
        return call(f"{x}.unbind", axis)
    sizes = [shapes[0][axis] for shapes in node.outputs]
    if any(len({shape[axis] for shape in shapes}) > 1 for shapes in node.outputs):
        if "sections" in node and not node["sections"]:
            return call(f"{x}.tensor_split", tuple(node["indices"])[1:], axis)
        return call(f"{x}.chunk", len(sizes), axis)
    return call(f"{x}.split", sizes[0] if len(set(sizes)) == 1 else sizes, axis)


def concat(node: Node, *inputs: str) -> str:
    if node.op == "_npi_concatenate":  # the registry describes Concat's attributes instead
        axis = parse("int", node.attrs.get("axis", "0"))
    else:
        axis = node["dim" if "dim" in node else "axis"]
    # PyTorch's exporter sometimes counts axes from the end wrongly
    axis %= len(node.outputs[0][0])
    return call("torch.stack" if "stack" in node.op else "torch.cat", f"[{', '.join(inputs)}]", dim=axis)


def squeeze(node: Node, x: str) -> str:
    axes = [axis for axis in node.axes() if all(shape[axis] == 1 for shape in node.inputs[0])]
    return x + "".join(f".squeeze({axis})" for axis in sorted(axes, reverse=True))


def repeat(node: Node, x: str) -> str:
    if node["axis"] is None:
        return call(f"{x}.flatten().repeat_interleave", node["repeats"], 0)
    axis = node["axis"] % node.rank  # ONNX Runtime repeats another axis if it counts from the end
    return call(f"{x}.repeat_interleave", node["repeats"], axis)


def expand(node: Node, x: str, *like: str) -> str:
    node.read.update(RESHAPED)
    return call(f"{x}.expand", *node.shape(x, *like))


def depth_to_space(node: Node, x: str) -> str:
    b, (n, c, h, w) = node["block_size"], (f"{x}.shape[{i}]" for i in range(4))
    if node.kind == "depthtospace":
        blocks = f"{call(f'{x}.reshape', n, b, b, -1, h, w)}.permute(0, 3, 4, 1, 5, 2)"
        return call(f"{blocks}.reshape", n, -1, f"{h} * {b}", f"{w} * {b}")
    blocks = f"{call(f'{x}.reshape', n, c, f'{h} // {b}', b, f'{w} // {b}', b)}.permute(0, 3, 5, 1, 2, 4)"
    return call(f"{blocks}.reshape", n, -1, f"{h} // {b}", f"{w} // {b}")


def softmax(node: Node, x: str, *lengths: str) -> str:
    if node.kind == "softmaxactivation":
        return call("F.softmax", x, dim=1 if node["mode"] == "channel" else -1)
    node.read |= {"dtype", "use_length"}
    temperature, axis = node["temperature"] or 1.0, node["axis"]
    source = f"-{x}" if node.kind == "softmin" else x
    source += "" if temperature == 1 else f" / {temperature!r}"
    if lengths and node.kind == "softmax":
        return call("softmax_of_lengths", source, *lengths, axis)
    if lengths:
        raise Unsupported("use_length='True' is not supported")
    return call("F.log_softmax" if node.kind == "logsoftmax" else "F.softmax", source, dim=axis)


def reduction(function: str) -> Callable[..., str]:
    """A rule for an operator that reduces axes. function: its name in PyTorch."""

    def rule(node: Node, x: str) -> str:
        axes, keep = node.axes(), node["keepdims"]
        if function == "prod" and len(axes) > 1:
            return x + "".join(f".prod({axis}, keepdim={keep})" for axis in axes[::-1])
        code = call(
            f"torch.{function}",
            x,
            ord=_unless(2, node["ord"]) if "ord" in node else None,
            dim=_short(axes),
            keepdim=_unless(False, keep),
            correction=_unless(1, node["ddof"]) if "ddof" in node else None,
        )
        to_scalar = len(axes) == node.rank and not keep
        if node.op in ("_npi_std", "_npi_var"):
            return f"{code}.detach()"  # MXNet's have no gradient
        return f"{code}.reshape(1)" if to_scalar and node.outputs[0][0] == (1,) else code

    return rule


def arg_reduction(node: Node, x: str) -> str:
    function = "argmin" if "argmin" in node.op else "argmax"
    if node.kind == "argmaxchannel":
        return f"{x}.argmax(1).float()"
    code = call(f"{x}.{function}", node["axis"], keepdim=_unless(False, node["keepdims"]))
    return code if node.op.startswith("_npi") else f"{code}.to({x}.dtype)"


def topk(node: Node, x: str) -> str:
    kind = node.word("ret_typ", "indices", "value", "both", "mask")
    node.read.add("k")
    size = node["k"] if kind == "mask" else node.outputs[0][0][node["axis"]]
    code = call(f"{x}.topk", size, node["axis"], largest=_unless(True, not node["is_ascend"]))
    if kind == "value":
        node.read.add("dtype")
        return f"{code}[0]"
    if kind == "mask":
        node.read.add("dtype")
        return f"torch.zeros_like({x}).scatter({node['axis']}, {code}[1], 1)"
    return node.to_dtype(f"{code}[1]") if kind == "indices" else f"[part.to({x}.dtype) for part in {code}]"


def sort(node: Node, x: str) -> str:
    if node.kind == "sort":
        return f"{call(f'{x}.sort', node['axis'], descending=_unless(False, not node['is_ascend']))}[0]"
    return node.to_dtype(call(f"{x}.argsort", node["axis"], descending=_unless(False, not node["is_ascend"])))


def dropout(node: Node, x: str) -> str:
    node.word("mode", "training")
    shared = node["axes"] or ()  # along these axes, all elements are dropped together
    if not shared:
        return call("F.dropout", x, node["p"], "self.training")
    ones = f"torch.ones_like({x + index(*((0, 1) if axis in shared else () for axis in range(node.rank)))})"
    return f"{x} * {call('F.dropout', ones, node['p'], 'self.training')}"


def l2_normalization(node: Node, x: str) -> str:
    first, end = {"instance": (1, node.rank), "channel": (1, 2), "spatial": (2, node.rank)}[node["mode"]]
    total = call(f"{x}.square().sum", _short(tuple(range(first, end))), keepdim=True)
    return f"{x} / ({total} + {node['eps']!r}).sqrt()"


def matrix_product(node: Node, a: str, b: str, *added: str) -> str:
    if node.op == "dot" and (node.rank > 2 or len(node.inputs[1][0]) > 2):
        return call("torch.tensordot", a, b, dims=1)
    left = f"{a}.transpose(-2, -1)" if "transpose_a" in node and node["transpose_a"] else a
    right = f"{b}.transpose(-2, -1)" if "transpose_b" in node and node["transpose_b"] else b
    alpha = node["alpha"] if "alpha" in node else 1
    code = f"{left} @ {right}" if alpha == 1 else f"{alpha!r} * ({left} @ {right})"
    return "".join([code, *(f" + {node['beta']!r} * {c}" for c in added)])


def in_range(node: Node, indices: str, size: int | str) -> str:
    """The code for integer indices. MXNet accepts indices that are out of range."""
    if node["mode"] == "wrap":
        return f"{indices}.long() % {size}"
    last = size - 1 if isinstance(size, int) else f"{size} - 1"
    return f"{indices}.long().clamp(0, {last})"


def take(node: Node, x: str, indices: str) -> str:
    axis = node["axis"] % node.rank
    return f"{x}[{':, ' * axis}{in_range(node, indices, node.size(x, axis))}]"


def pick(node: Node, x: str, indices: str) -> str:
    axis = node["axis"] % node.rank
    source = indices if len(node.inputs[1][0]) == node.rank else f"{indices}.unsqueeze({axis})"
    code = call(f"{x}.gather", axis, in_range(node, source, node.size(x, axis)))
    return code if node["keepdims"] else call(f"{code}.squeeze", axis)


def one_hot(node: Node, x: str) -> str:
    on, off = node["on_value"], node["off_value"]
    code = node.to_dtype(f"({x}.long().unsqueeze(-1) == torch.arange({node['depth']!r}, device={x}.device))")
    return code if (on, off) == (1, 0) else f"{code} * {on - off!r} + {off!r}"


def where(node: Node, condition: str, a: str, b: str) -> str:
    ranks = [len(shapes[0]) for shapes in node.inputs]
    rows = f".reshape{(-1, *[1] * (ranks[1] - 1))}" if ranks[0] == 1 < ranks[1] and node.op == "where" else ""
    return f"torch.where({condition}{rows} != 0, {a}, {b})"


def arange_like(node: Node, x: str) -> str:
    axis, (start, step) = node["axis"], (node["start"], node["step"])
    count = f"{x}.numel()" if axis is None else f"{x}.shape[{axis}]"
    code = f"torch.arange({count}, device={x}.device).float()" + f".reshape({x}.shape)" * (axis is None)
    return code if (start, step) == (0, 1) else f"{start!r} + {step!r} * {code}"


def filled(node: Node, x: str) -> str:
    node.read.add("shape")
    dtype = _unless("torch.float32", f"torch.{node['dtype']}")
    return call(f"torch.{node.kind}", *node.shape(x), device=f"{x}.device", dtype=dtype)


def sequence(node: Node, x: str, *lengths: str) -> str:
    axis, kind = node["axis"], node.kind.removeprefix("sequence")
    node.read.add("use_sequence_length")  # otherwise there are no lengths
    if not lengths:
        node.read.add("value")
        return {"mask": x, "last": f"{x}.select({axis}, -1)", "reverse": f"{x}.flip({axis})"}[kind]
    value = (node["value"],) if kind == "mask" else ()
    return call(f"sequence_{kind}", x, *lengths, *([axis] if kind != "reverse" else []), *value)


def attention(node: Node, x: str, y: str = "") -> str:
    """The operators of GluonNLP's BERT, whose queries, keys and values are interleaved in one array."""
    heads = node["heads"]
    kind = node.op.removeprefix("_contrib_interleaved_matmul_")
    if kind.endswith("valatt"):
        parts = 3 if kind == "selfatt_valatt" else 2
        return call("attention_values", x, y, heads, parts)
    parts = 3 if kind == "selfatt_qk" else 1
    queries = call("head", x, heads, 0, parts)
    keys = call("head", x, heads, 1, 3) if parts == 3 else call("head", y, heads, 0, 2)
    size = node.size(x, 2)
    if isinstance(size, str):
        raise Unsupported("the number of its features varies", fixed_size=True)
    return f"{queries} @ {keys}.transpose(1, 2) / {math.sqrt(size / heads / parts)!r}"


def grid(node: Node, x: str, *loc: str) -> str:
    if node.op == "BilinearSampler":
        return f"F.grid_sample({x}, {loc[0]}.permute(0, 2, 3, 1), align_corners=True)"
    if node.word("transform_type", "affine", "warp") == "warp":
        node.read.add("target_shape")  # only affine uses it
        return call("warp_grid", x)
    if node.op == "GridGenerator":
        return f"{call('affine_grid', x, *node['target_shape'])}.permute(0, 3, 1, 2)"
    node.read.add("sampler_type")
    return call("F.grid_sample", x, call("affine_grid", *loc, *node["target_shape"]), align_corners=True)


def box_decode(node: Node, x: str, anchors: str) -> str:
    scales, largest = [node[f"std{k}"] for k in range(4)], node["clip"] if node["clip"] > 0 else -LOWEST
    return call("box_decode", x, anchors, scales, largest, node["format"] == "corner")


def smooth_l1(node: Node, x: str) -> str:
    squared = (node["scalar"] if "scalar" in node.attrs else 1.0) ** 2
    return f"torch.where({x}.abs() < {1 / squared!r}, {squared / 2!r} * {x} * {x}, {x}.abs() - {0.5 / squared!r})"


def correlation(node: Node, x: str, y: str) -> str:
    sizes = [node[key] for key in ("kernel_size", "max_displacement", "stride1", "stride2", "pad_size")]
    return call("correlation", x, y, *sizes, node["is_multiply"])


def image_normalize(node: Node, x: str) -> str:
    channels = node.inputs[0][0][-3]
    mean, std = (
        (node[key] * channels)[:channels] if len(node[key]) == 1 else node[key][:channels] for key in ("mean", "std")
    )
    return f"({x} - {_of_channels(mean, x)}) / {_of_channels(std, x)}"


def _of_channels(values: tuple[float, ...], x: str) -> str:
    return repr(values[0]) if len({*values}) == 1 else f"torch.tensor({[*values]}, device={x}.device).reshape(-1, 1, 1)"


def image_resize(node: Node, x: str) -> str:
    mode = {0: "'nearest'", 1: "'bilinear'"}.get(node["interp"])
    if mode is None:
        raise Unsupported(f"interp={node['interp']!r} is not supported")
    if node["keep_ratio"] and len({shape[-3:-1] for shape in node.inputs[0]}) > 1:
        raise Unsupported("keep_ratio is only supported for images of one size", fixed_size=True)
    node.read.add("size")
    images, last = (x, "") if node.rank == 4 else (f"{x}.unsqueeze(0)", ".squeeze(0)")
    code = call("F.interpolate", f"{images}.permute(0, 3, 1, 2)", size=node.outputs[0][0][-3:-1], mode=mode)
    return f"{code}.permute(0, 2, 3, 1){last}"


def einsum(node: Node, *inputs: str) -> str:
    node.read.add("subscripts")
    if not re.fullmatch(r"[A-Za-z,.> -]+", subscripts := node.attrs["subscripts"]):
        raise Unsupported(f"subscripts={subscripts!r} is not supported")
    return call("torch.einsum", repr(subscripts), *inputs)


def deformable(node: Node, x: str, offset: str, *others: str) -> str:
    mask, weights = (others[0], others[1:]) if node.kind.startswith("modulated") else ("None", others)
    node.read |= {"kernel", "layout", "im2col_step"}
    sizes = [node.sizes(key, default) for key, default in (("stride", 1), ("pad", 0), ("dilate", 1))]
    weights = (*weights, "None")[:2]
    groups = node["num_group"], node["num_deformable_group"]
    return call("deformable_convolution", x, offset, mask, *weights, *sizes, *groups)


LAYERS = (convolution, fully_connected, batch_norm, layer_norm, instance_norm, group_norm, embedding, leaky_relu, rnn)
# They accept weights that are computed or constant
FUNCTIONAL = (convolution, fully_connected, layer_norm, instance_norm, group_norm, embedding, leaky_relu)
UNARY = {
    **{
        name: f"torch.{name}"
        for name in """abs ceil cos erf erfinv exp expm1 floor log log10 log1p log2 reciprocal relu rsqrt sigmoid
            sign sin sqrt square tan tanh trunc zeros_like ones_like isnan isinf isfinite""".split()
    },
    **{f"arc{name}": f"torch.a{name}" for name in ("cos", "sin", "tan")},
    "absolute": "torch.abs",
    "around": "torch.round",
    "fix": "torch.trunc",
    "gammaln": "torch.lgamma",
    "negative": "torch.neg",
    "softsign": "F.softsign",
}
ARITHMETIC = {
    **dict.fromkeys(("add", "plus", "grad_add"), "{0} + {1}"),
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
    "less": "<",
    "less_equal": "<=",
    "lesser": "<",
    "lesser_equal": "<=",
}
LOGICAL = {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}
BINARY = {
    **ARITHMETIC,
    # Outside mx.np, the result of a comparison has the type of its first input.
    **{name: f"({{0}} {sign} {{1}}).to({{0}}.dtype)" for name, sign in COMPARISONS.items()},
    **{name: f"(({{0}} != 0) {sign} ({{1}} != 0)).to({{0}}.dtype)" for name, sign in LOGICAL.items()},
    **{f"_npi_{name}": f"{{0}} {sign} {{1}}" for name, sign in COMPARISONS.items()},
}
REDUCTIONS = {
    "sum": "sum",
    "mean": "mean",
    "max": "amax",
    "min": "amin",
    "prod": "prod",
    "std": "std",
    "var": "var",
    "nansum": "nansum",
    "norm": "linalg.vector_norm",
    "all": "all",
    "any": "any",
}
FLATTEN = "{0}.flatten(1)"
TILE = "torch.tile({0}, {reps})"
RESHAPES = (FLATTEN, TILE, expand, reshape, squeeze)  # nothing to do if the output has the input's shape

# The code for each operator: a template, or a function that returns the code
RULES: dict[str, Rule] = {
    **{name: f"{code}({{0}})" for name, code in UNARY.items()},
    **BINARY,
    **{f"{name}_scalar": code.format("{0}", "{scalar}") for name, code in BINARY.items()},
    **{f"r{name}_scalar": code.format("{scalar}", "{0}") for name, code in ARITHMETIC.items()},
    "maximum_scalar": "{0}.clamp(min={scalar})",
    "minimum_scalar": "{0}.clamp(max={scalar})",
    "mod_scalar": "{0} % {scalar}",
    "rpower_scalar": "torch.pow({scalar}, {0})",  # -2.0 ** x is -(2.0 ** x)
    **{name: reduction(code) for name, code in REDUCTIONS.items()},
    **dict.fromkeys(("copy", "MakeLoss", "IdentityAttachKLSparseReg"), "{0}"),
    **dict.fromkeys(("cast_storage", "identity_with_attr_like_rhs"), "{0}"),
    "round_ste": "{0} + (torch.trunc(2 * {0} - torch.trunc({0})) - {0}).detach()",
    "sign_ste": "{0} + ({0}.sign() - {0}).detach()",
    "smooth_l1": smooth_l1,
    "Correlation": correlation,
    "image_to_tensor": lambda node, x: f"{x}.permute{(0, 3, 1, 2) if node.rank == 4 else (2, 0, 1)} / 255",
    "image_normalize": image_normalize,
    "image_resize": image_resize,
    "image_crop": lambda node, x: (
        x + index("...", *((node[k], node[k] + node[size]) for k, size in (("y", "height"), ("x", "width"))), ())
    ),
    "amp_multicast": lambda node, *inputs: f"[{', '.join(inputs)}]",
    "moveaxis": "{0}.movedim({source}, {destination})",
    "where_lscalar": "torch.where({0} != 0, {scalar}, {1})",
    "where_rscalar": "torch.where({0} != 0, {1}, {scalar})",
    "where_scalar2": "torch.where({0} != 0, {x}, {y})",
    "einsum": einsum,
    "BlockGrad": "{0}.detach()",
    "gradientmultiplier": "scale_gradient({0}, {scalar})",
    # torch.round rounds halves to even numbers, MXNet's round away from zero, and its rint down
    "round": "torch.trunc(2 * {0} - torch.trunc({0}))",
    "rint": "torch.where({0} - {0}.floor() <= 0.5, {0}.floor(), {0}.ceil())",
    "hard_sigmoid": "({0} * {alpha} + {beta}).clamp(0, 1)",
    "div_sqrt_dim": "{0} / {0}.shape[-1] ** 0.5",
    "logical_not": "({0} == 0).to({0}.dtype)",
    "clip": "{0}.clamp({a_min}, {a_max})",
    "LRN": "F.local_response_norm({0}, {nsize}, {alpha}, {beta}, {knorm})",
    "AdaptiveAvgPooling2D": lambda node, x: call("F.adaptive_avg_pool2d", x, _short(node["output_size"] or (1,))),
    "BilinearResize2D": resize,
    "cumsum": "{0}.cumsum({axis})",
    "arctan2": "torch.atan2({0}, {1})",
    "full_like": "torch.full_like({0}, {fill_value})",
    "box_decode": box_decode,
    **dict.fromkeys(("DeformableConvolution", "ModulatedDeformableConvolution"), deformable),
    "add_n": lambda node, *inputs: " + ".join(inputs),
    "Flatten": FLATTEN,
    "tril": "{0}.tril({k})",
    "size_array": "torch._shape_as_tensor({0}).prod().reshape(1)",
    "roll": "torch.roll({0}, {shift}, {axis})",
    "shape_array": "torch._shape_as_tensor({0})",
    "expand_dims": lambda node, x: call(f"{x}.unsqueeze", node["axis"] % (node.rank + 1)),
    **dict.fromkeys(("SwapAxis", "swapaxes"), "{0}.transpose({dim1}, {dim2})"),
    "tile": TILE,
    "transpose": lambda node, x: call(f"{x}.permute", *(node["axes"] or range(node.rank)[::-1])),
    "slice_axis": lambda node, x: x + index(*[()] * (node["axis"] % node.rank), (node["begin"], node["end"])),
    "moments": lambda node, x: (
        f"{call('torch.var_mean', x, dim=_short(node.axes('axes')), correction=0, keepdim=node['keepdims'])}[::-1]"
    ),
    **dict.fromkeys(("reverse", "flip"), "{0}.flip({axis})"),
    **dict.fromkeys(("Cast", "amp_cast"), lambda node, x: f"{x}.to(torch.{node['dtype']})"),
    "gather_nd": "{0}[tuple(i % size for i, size in zip({1}.long(), {0}.shape))]",
    # Rules with the operator's name, and with other names
    **{
        rule.__name__: rule
        for rule in (
            *(*LAYERS, activation, arange_like, crop, depth_to_space, dropout, l2_normalization),
            *(one_hot, pad, pick, pooling, repeat, reshape, slice_like, softmax),
            *(sort, squeeze, take, topk, upsampling, where),
        )
    },
    **dict.fromkeys(("SyncBatchNorm", "BatchNormWithReLU"), batch_norm),
    "Deconvolution": convolution,
    "SparseEmbedding": embedding,
    "argsort": sort,
    "reshape_like": reshape,
    "slice": slices,
    "space_to_depth": depth_to_space,
    **dict.fromkeys(("log_softmax", "softmin", "SoftmaxActivation"), softmax),
    **dict.fromkeys(("dot", "batch_dot", "linalg_gemm", "linalg_gemm2", "matmul"), matrix_product),
    **dict.fromkeys(("argmax", "argmin", "argmax_channel"), arg_reduction),
    **dict.fromkeys(("SliceChannel", "split_v2", "split"), split),
    **dict.fromkeys(("Concat", "concatenate", "stack"), concat),
    **dict.fromkeys(("broadcast_to", "broadcast_like", "broadcast_axis"), expand),
    # Their shapes depend on the network's input
    **dict.fromkeys(("zeros", "ones"), filled),
    **dict.fromkeys(("SequenceMask", "SequenceLast", "SequenceReverse"), sequence),
    **{f"interleaved_matmul_{kind}_{name}": attention for kind in ("selfatt", "encdec") for name in ("qk", "valatt")},
    **dict.fromkeys(("SpatialTransformer", "GridGenerator", "BilinearSampler"), grid),
}
SIMPLE_RULES = {simple(name): rule for name, rule in RULES.items() if not name.startswith("_npi_")}
# Why operators are left out
REASONS = {
    "Custom": "the graph does not contain its code",
    **dict.fromkeys(("_foreach", "_while_loop", "_cond"), "loops and branches are not supported"),
    **dict.fromkeys(("CTCLoss", "_contrib_MultiBoxTarget"), "it needs labels"),
    "_contrib_MultiBoxPrior": "it is only supported for images of one size",
    **dict.fromkeys(
        ("_contrib_box_nms", "_contrib_MultiBoxDetection", "_contrib_Proposal", "_contrib_MultiProposal"),
        "which boxes it keeps depends on rounding, so it cannot be checked",
    ),
    **dict.fromkeys(("_contrib_PSROIPooling", "_contrib_DeformablePSROIPooling"), "MXNet computes it only on GPUs"),
    **dict.fromkeys(("ROIPooling", "_contrib_ROIAlign"), "PyTorch has it only in torchvision"),
}


def find_rule(op: str) -> Rule | None:
    """The rule for an operator, if it can be converted."""
    return RULES.get(op) or SIMPLE_RULES.get(simple(op))


def reason(op: str) -> str:
    """Why an operator cannot be converted."""
    if re.search("random|sample|shuffle|_npi_(normal|uniform|bernoulli|gamma|gumbel|choice|multinomial)", op):
        return "its random numbers differ between frameworks"
    return REASONS.get(op, "it is not supported")
