"""Converted operators give MXNet's results, also where frameworks differ: for ties, fractions, negative numbers, and numbers
that are out of range."""

import json

import numpy as np
import pytest
from conversions import ONNX, PYTORCH
from mxnet import symbol as s

from gluon_mgpu import convert
from gluon_mgpu.convert.network import Network, Sample

N = 4  # batch size
HALVES = np.arange(-3, 3.5, 0.5)
# For each input of the network below: a function that draws it, and its shape without the batch
INPUTS = {
    "x": (lambda random, size: random.normal(0, 3, size), (6,)),
    "ties": (lambda random, size: random.choice(HALVES, size), (6,)),
    "other": (lambda random, size: random.choice(HALVES, size), (6,)),
    "unit": (lambda random, size: random.uniform(-1, 1, size), (6,)),
    "positive": (lambda random, size: random.uniform(0.1, 9, size), (6,)),
    "index": (lambda random, size: random.choice([-7, -1, -0.6, 0, 0.7, 1, 2.9, 4, 5, 6, 7.5, 23], size), (5,)),
    "which": (lambda random, size: random.choice([-9, -1, 0.4, 3, 5, 5.9, 6, 11], size), ()),
    "image": (lambda random, size: random.normal(0, 3, size), (4, 9, 9)),
}


def cases(x, ties, other, unit, positive, index, which, image):
    """Outputs (n, ...) by name."""
    table = s.reshape(s.arange(24), (8, 3))
    for name in "abs ceil exp expm1 fix floor negative relu rint round sigmoid sign softsign square trunc".split():
        yield name, getattr(s, name)(ties)
    for name in "cos erf sin tan tanh degrees radians reciprocal cosh sinh arcsinh arctan logical_not".split():
        yield name, getattr(s, name)(x)
    for name in "log log10 log1p log2 rsqrt sqrt arccosh".split():
        yield name, getattr(s, name)(positive)
    for name in "arccos arcsin arctanh hard_sigmoid".split():
        yield name, getattr(s, name)(unit)
    for (
        name
    ) in """add sub mul div mod power maximum minimum hypot equal not_equal greater greater_equal lesser lesser_equal
            logical_and logical_or logical_xor""".split():
        yield f"broadcast_{name}", getattr(s, f"broadcast_{name}")(ties, other)
    for scalar in (-2.0, 0.5, 2.0):
        yield f"x + {scalar}", ties + scalar
        yield f"x - {scalar}", ties - scalar
        yield f"{scalar} - x", scalar - ties
        yield f"x * {scalar}", ties * scalar
        yield f"x / {scalar}", ties / scalar
        yield f"{scalar} / x", scalar / ties
        yield f"x % {scalar}", ties % scalar
        yield f"{scalar} % x", scalar % ties
        yield f"x ** {scalar}", ties**scalar
        yield f"{scalar} ** x", scalar**ties
        yield f"maximum(x, {scalar})", s.maximum(ties, scalar)
        yield f"minimum(x, {scalar})", s.minimum(ties, scalar)
        yield f"hypot(x, {scalar})", s.hypot(ties, scalar)
        yield f"x > {scalar}", ties > scalar
        yield f"x >= {scalar}", ties >= scalar
        yield f"x < {scalar}", ties < scalar
        yield f"x <= {scalar}", ties <= scalar
        yield f"x == {scalar}", ties == scalar
        yield f"x != {scalar}", ties != scalar
        yield f"smooth_l1 {scalar}", s.smooth_l1(x, scalar=scalar)
    for mode in ("clip", "wrap"):
        yield f"take {mode}", s.take(table, index, mode=mode)
        yield f"take {mode} axis 1", s.take(image, s.arange(-3, 12), axis=1, mode=mode)
        yield f"pick {mode}", s.pick(x, which, mode=mode)
        yield (
            f"pick {mode} axis 1",
            s.pick(image, s.broadcast_add(s.reshape(which, (-1, 1, 1)), s.zeros((1, 9, 9))), axis=1, mode=mode),
        )
    yield "Embedding", s.Embedding(index, table, 8, 3)
    yield "one_hot", s.one_hot(index, 7, on_value=-1, off_value=3)
    yield "where", s.where(ties, ties, x)
    yield "clip", s.clip(ties, -1.5, 2)
    yield "cast", s.cast(s.cast(x, "int32"), "float32")
    yield "argmax", s.argmax(ties, axis=1)
    yield "argmin", s.argmin(ties, axis=1, keepdims=True)
    yield "argmax_channel", s.argmax_channel(ties)
    yield "topk value", s.topk(ties, k=3, ret_typ="value", is_ascend=True)
    yield "topk", s.topk(x, k=3)


@pytest.fixture(scope="module")
def every_case():
    """The names of the cases, and a network that computes all of them."""
    names, outputs = zip(*cases(*map(s.var, INPUTS)))
    given = Network(json.loads(s.Group(outputs).tojson()), {}, list(INPUTS), [])
    random = np.random.default_rng(0)
    for n in (N, 3 * N):
        X = tuple(draw(random, (n, *shape)).astype(np.float32) for draw, shape in INPUTS.values())
        given.samples.append(Sample(X, given.predict(X)))
    return names, given


@pytest.mark.parametrize("to", [PYTORCH, ONNX])
def test_an_operator_gives_mxnets_results_for_ties_fractions_and_numbers_out_of_range(to, every_case, tmp_path):
    names, given = every_case
    target = convert.TARGETS[to]
    target.write(given, str(tmp_path / "net"))
    wrong = {}
    for sample, outputs in zip(given.samples, target.outputs(given, str(tmp_path / "net"))):
        for name, expected, output in zip(names, sample.outputs, outputs):
            if not np.allclose(output, expected, rtol=1e-5, atol=1e-6, equal_nan=True):
                wrong[name] = expected.ravel()[:6], output.ravel()[:6]
    assert wrong == {}
