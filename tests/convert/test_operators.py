"""Converted operators give MXNet's results, also for ties, fractions, and numbers that are negative or out of range."""

import numpy as np
import pytest
from conversions import ONNX, PYTORCH
from mxnet import symbol as s

from gluon_mgpu import convert
from gluon_mgpu.convert.exported import Exported, Sample
from gluon_mgpu.convert.graph import Graph

N = 4  # batch size

COMPARISONS = "equal not_equal greater greater_equal lesser lesser_equal".split()
OTHERS = "power maximum minimum hypot".split()
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
    "other_image": (lambda random, size: random.normal(0, 3, size), (2, 5, 4)),
    "words": (lambda random, size: random.normal(0, 3, size), (5, 24)),  # a sequence
    "length": (lambda random, size: random.integers(1, 6, size), ()),
    "boxes": (lambda random, size: np.sort(random.uniform(-4, 12, size)), (5, 4)),
    "offsets": (lambda random, size: random.normal(0, 2, size), (2 * 2 * 6, 4, 4)),
}


def cases(x, ties, other, unit, positive, index, which, image, other_image, words, length, boxes, offsets):
    """Outputs (n, ...) by name."""
    table = s.reshape(s.arange(24), (8, 3))
    for name in "abs ceil exp expm1 fix floor negative relu rint round sigmoid sign softsign square trunc".split():
        yield name, getattr(s, name)(ties)
    for name in "cos erf sin tan tanh reciprocal arctan logical_not".split():
        yield name, getattr(s, name)(x)
    for name in "log log10 log1p log2 rsqrt sqrt".split():
        yield name, getattr(s, name)(positive)
    for name in "arccos arcsin hard_sigmoid".split():
        yield name, getattr(s, name)(unit)
    for name in (*COMPARISONS, *"add sub mul div mod logical_and logical_or logical_xor".split(), *OTHERS):
        yield f"broadcast_{name}", getattr(s, f"broadcast_{name}")(ties, other)
    for scalar in (-2.0, 0.5, 2.0):
        for name in (*COMPARISONS, *"plus minus mul div mod rminus rdiv rmod rpower".split(), *OTHERS):
            yield f"{name} {scalar}", getattr(s._internal, f"_{name}_scalar")(ties, scalar=scalar)
    of_pixels = s.broadcast_add(s.reshape(which, (-1, 1, 1)), s.zeros((1, 9, 9)))
    for mode in ("clip", "wrap"):
        yield f"take {mode}", s.take(table, index, mode=mode)
        yield f"take {mode} axis 1", s.take(image, s.arange(-3, 12), axis=1, mode=mode)
        yield f"pick {mode}", s.pick(x, which, mode=mode)
        yield f"pick {mode} axis 1", s.pick(image, of_pixels, axis=1, mode=mode)
    yield "one_hot", s.one_hot(index, 7, on_value=-1, off_value=3)
    yield "where", s.where(ties, ties, x)
    tiles = s.concat(s.tile(x, (3, 1, 1)), s.tile(s.expand_dims(ties, 0), (3, 1, 1)), dim=-1)
    yield "tile", s.transpose(tiles, (1, 0, 2))
    yield "clip", s.clip(ties, -1.5, 2)
    yield "cast", s.cast(s.cast(x, "int32"), "float32")
    yield "argmax", s.argmax(ties, axis=1)
    yield "argmin", s.argmin(ties, axis=1, keepdims=True)
    yield "argmax_channel", s.argmax_channel(ties)
    yield "topk value", s.topk(ties, k=3, ret_typ="value", is_ascend=True)
    yield "topk", s.topk(x, k=3)
    yield "topk mask", s.topk(image, k=2, axis=1, ret_typ="mask", is_ascend=True)
    yield from ((f"topk both {k}", part) for k, part in enumerate(s.topk(x, k=3, ret_typ="both")))
    yield "sort", s.sort(ties, is_ascend=False)
    yield "argsort", s.argsort(x)
    yield "shape_array", s.shape_array(image)
    yield "gather_nd", s.gather_nd(image, s.cast(s.stack(s.clip(which, 0, 3), s.clip(which, -3, 3), axis=0), "int32"))
    yield "squeeze", s.squeeze(s.expand_dims(s.expand_dims(x, axis=1), axis=3), axis=(1, 3))
    yield "slice", s.slice(image, begin=(None, -1, None), end=(None, None, -7), step=(1, -2, -1))
    yield from ((f"moments {k}", part) for k, part in enumerate(s.moments(image, axes=(1, 2))))
    yield "softmin", s.softmin(x, temperature=0.5)
    yield "softmax", s.softmax(x, temperature=2.5)
    yield "softmax over all axes but the last", s.SoftmaxActivation(image)
    yield "softmax of channels", s.SoftmaxActivation(image, mode="channel")
    yield "Crop", s.Crop(image, h_w=(3, 4))
    yield "Crop center", s.Crop(image, h_w=(4, 5), center_crop=True)
    yield "Crop offset", s.Crop(image, other_image, num_args=2, offset=(2, 3))
    yield "Crop center like", s.Crop(image, other_image, num_args=2, center_crop=True)
    yield "UpSampling", s.UpSampling(image, scale=2, sample_type="nearest")
    large = s.UpSampling(other_image, scale=2, sample_type="nearest")
    for mode in ("concat", "sum"):
        options = {"scale": 4, "sample_type": "nearest", "num_args": 2, "multi_input_mode": mode}
        yield f"UpSampling {mode}", s.UpSampling(other_image, large, **options)
    options = {"scale": 2, "num_filter": 2, "sample_type": "bilinear", "num_args": 2}
    yield "UpSampling bilinear", s.UpSampling(other_image, s.reshape(s.arange(32), (2, 1, 4, 4)), **options)
    for scale in (2.0, 0.5):
        yield f"BilinearResize2D {scale}", s.contrib.BilinearResize2D(image, scale_height=scale, scale_width=2.0)
    for mode in "odd_scale to_even_down to_even_up to_odd_down to_odd_up".split():
        scales = {"scale_height": 1.5, "scale_width": 2.0} if mode == "odd_scale" else {}
        yield f"BilinearResize2D {mode}", s.contrib.BilinearResize2D(image, mode=mode, **scales)
    yield "BilinearResize2D like", s.contrib.BilinearResize2D(image, other_image, mode="like", align_corners=False)
    for kind in ("max", "avg", "sum", "lp"):
        for pad, rounding in ((2, "valid"), (0, "full")):
            options = {"kernel": (3, 3), "stride": (2, 4), "pad": (pad, pad), "pool_type": kind, "p_value": 2}
            yield f"Pooling {kind} {rounding}", s.Pooling(image, pooling_convention=rounding, **options)
        yield f"Pooling {kind} global", s.Pooling(image, global_pool=True, pool_type=kind, p_value=2, kernel=(1, 1))
    yield "Pooling lp 1", s.Pooling(image, kernel=(3, 3), pool_type="lp", p_value=1)
    for k, options in enumerate(
        (
            {"max_displacement": 4, "stride2": 2, "pad_size": 4},
            {"kernel_size": 3, "max_displacement": 2, "stride1": 2, "pad_size": 3, "is_multiply": False},
        )
    ):
        yield f"Correlation {k}", s.Correlation(image, image * image, **options)
    flow = s.slice_axis(image, axis=1, begin=0, end=2)
    yield "warp", s.BilinearSampler(image, s.GridGenerator(flow, transform_type="warp"))
    yield "smooth_l1", s.smooth_l1(ties, scalar=1.5)
    yield "rrelu", s.LeakyReLU(x, act_type="rrelu", lower_bound=0.2, upper_bound=0.6)[0]
    yield "round_ste", s.contrib.round_ste(ties) + s.contrib.sign_ste(ties)
    yield from ((f"amp_multicast {k}", part) for k, part in enumerate(s.amp_multicast(x, ties, num_outputs=2)))
    yield "prod of two axes", s.prod(image, axis=(1, 3))
    yield from ((f"split_v2 {k}", part) for k, part in enumerate(s.split_v2(image, (1, 5), axis=3)))
    colors = s.slice_axis(words, axis=2, begin=0, end=3)
    colors = s.reshape(s.tile(s.expand_dims(colors, 1), (1, 7, 1, 1)), (-1, 7, 5, 3))
    yield "to_tensor", s.image.to_tensor(colors)
    mean = {"mean": (1.0, 2.0, 3.0), "std": (0.5, 2.0, 3.0)}
    yield "normalize", s.image.normalize(s.transpose(colors, (0, 3, 1, 2)), **mean)
    yield "image crop", s.image.crop(colors, 1, 2, 3, 4)
    for interp in (0, 1):
        yield f"image resize {interp}", s.image.resize(colors, size=(8, 3), interp=interp)
    yield "gemm", s.linalg.gemm(words, words, s.batch_dot(words, words, transpose_b=True), transpose_b=True, beta=2.0)
    yield "AdaptiveAvgPooling2D", s.contrib.AdaptiveAvgPooling2D(image, output_size=(4, 2))
    differences, anchors = s.sin(boxes), s.slice_axis(boxes, axis=0, begin=0, end=1)
    for kind in ("corner", "center"):
        options = {"std0": 0.1, "std1": 0.2, "std2": 0.3, "std3": 0.4, "clip": 0.5, "format": kind}
        yield f"box_decode {kind}", s.contrib.box_decode(differences, anchors, **options)
    table = s.reshape(s.sin(s.arange(96)), (8, 2, 3, 2))
    options = {"kernel": (3, 2), "stride": (2, 2), "pad": (0, 0), "dilate": (1, 1), "num_filter": 8, "num_group": 2}
    options |= {"num_deformable_group": 2, "no_bias": True}
    yield "DeformableConvolution", s.contrib.DeformableConvolution(image, offsets, table, **options)
    mask = s.slice_axis(offsets, axis=1, begin=0, end=12)
    yield "Modulated", s.contrib.ModulatedDeformableConvolution(image, offsets, mask, table, **options)
    yield "LayerNorm of axis 1", s.LayerNorm(image, s.arange(4), s.arange(4), axis=1)
    time_first = s.transpose(words, (1, 0, 2))
    for axis, sequence in ((0, time_first), (1, words)):
        options = {"sequence_length": length, "use_sequence_length": True, "axis": axis}
        yield f"SequenceMask {axis}", s.SequenceMask(sequence, value=-2, **options)
        yield f"SequenceLast {axis}", s.SequenceLast(sequence, **options)
    yield "SequenceReverse", s.SequenceReverse(time_first, length, use_sequence_length=True)
    lengths = s.cast(s.broadcast_add(s.expand_dims(length, 1), s.zeros((1, 2))), "int32")
    pairs = s.slice_axis(words, axis=2, begin=0, end=2)
    yield "softmax length", s.softmax(pairs, lengths, axis=1, use_length=True)
    scores = s.contrib.interleaved_matmul_selfatt_qk(time_first, heads=2)
    yield "selfatt_qk", scores
    yield "selfatt_valatt", s.contrib.interleaved_matmul_selfatt_valatt(time_first, s.softmax(scores), heads=2)
    queries = s.slice_axis(time_first, axis=2, begin=0, end=12)
    scores = s.contrib.interleaved_matmul_encdec_qk(queries, time_first, heads=2)
    yield "encdec_qk", scores
    yield "encdec_valatt", s.contrib.interleaved_matmul_encdec_valatt(time_first, scores, heads=2)
    options = {"transform_type": "affine", "target_shape": (5, 7)}
    yield "SpatialTransformer", s.SpatialTransformer(image, unit, sampler_type="bilinear", **options)
    yield "BilinearSampler", s.BilinearSampler(image, s.GridGenerator(unit, **options))
    number = s.reshape(s.mean(x, axis=1), (-1, 1, 1))
    yield "MultiBoxPrior", s.broadcast_add(number, s.contrib.MultiBoxPrior(other_image))
    yield "Dropout of whole rows", s.Dropout(image, axes=(1, 2))
    pixels, triples = s.reshape(image, (0, 4, -1)), s.reshape(s.arange(24), (8, 3))
    others = (
        *(s.sum(image, axis=(2, 3)), s.sum(image, axis=(0, 1), exclude=True), s.max(image, axis=1), s.min(x, axis=1)),
        *(s.mean(x, axis=1, keepdims=True), s.norm(x, axis=1), s.log_softmax(x, axis=-1), s.flip(x, axis=1)),
        *(s.stack(x, -x, axis=1), s.add_n(x, x, ties), *s.split(image, 2, axis=1)),
        *(s.repeat(image, 2, axis=axis) for axis in (1, -1, -2)),
        *(s.slice_axis(image, axis=2, begin=-3, end=None), s.slice_like(s.flatten(image), x, axes=(1,))),
        *(s.batch_dot(pixels, pixels, transpose_b=True), s.depth_to_space(image, 2), s.L2Normalization(image)),
        *(s.contrib.BilinearResize2D(image, height=5, width=12), s.LRN(image, nsize=3)),
        *(s.reshape(image, (0, -4, 2, -1, -2)), s.reshape(image, (-1, 9), reverse=True)),
        *(s.broadcast_like(s.sum(image, axis=1, keepdims=True), image), s.Embedding(index, triples, 8, 3)),
        s.LRN(s.GroupNorm(image, s.arange(2), s.arange(2), num_groups=2), nsize=3),
    )
    yield from ((f"{output.name} {k}", output) for k, output in enumerate(others))
    weight = s.reshape(s.slice_axis(image, axis=0, begin=0, end=1), (9, 4, 3, 3))
    yield "Convolution with a computed weight", s.Convolution(image, weight, no_bias=True, kernel=(3, 3), num_filter=9)
    weight = s.reshape(s.slice_axis(image, axis=0, begin=0, end=1), (54, 6))
    yield "FullyConnected with a computed weight", s.FullyConnected(x, weight, no_bias=True, num_hidden=54)


@pytest.fixture(scope="module")
def every_case():
    """The names of the cases, and a network that computes all of them."""
    names, outputs = zip(*cases(*map(s.var, INPUTS)))
    given = Exported(Graph.of(s.Group(outputs)), {}, list(INPUTS), [])
    random = np.random.default_rng(0)
    for n in (N, 3 * N):
        X = tuple(draw(random, (n, *shape)).astype(np.float32) for draw, shape in INPUTS.values())
        given.samples.append(Sample(X, given.predict(X)))
    return names, given


@pytest.mark.slow
@pytest.mark.parametrize("to", [PYTORCH, ONNX])
def test_an_operator_gives_mxnets_results_for_ties_fractions_and_numbers_out_of_range(to, every_case, tmp_path):
    names, given = every_case
    target = convert.TARGETS[to]
    target.write(given, str(tmp_path / "net"))
    wrong = {}
    for sample, outputs in zip(given.samples, target.outputs(given, str(tmp_path / "net"))):
        for name, expected, output in zip(names, sample.outputs, outputs):
            rounding = 1e-6 * np.abs(expected, where=np.isfinite(expected), out=np.zeros(expected.shape)).max()
            if not np.allclose(output, expected, rtol=1e-5, atol=rounding, equal_nan=True):
                wrong[name] = expected.ravel()[:6], output.ravel()[:6]
    assert wrong == {}
