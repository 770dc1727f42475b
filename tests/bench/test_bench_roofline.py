"""The work of each operator that oneDNN prints, checked against sums by hand and against a real step."""

import pytest
from bench import harness, roofline

BLOCKED = "src_f32::blocked:aBcd16b:f0 wei_f32::blocked:ABcd16b16a:f0 bia_f32::blocked:a:f0 dst_f32::blocked:aBcd16b:f0"
POOLING = "mb64ic32_ih26oh13kh2sh2dh0ph0_iw26ow13kw2sw2dw0pw0"
CONVOLUTION = "mb64_ic32oc50_ih13oh9kh5sh1dh0ph0_iw13ow9kw5sw1dw0pw0"


IMAGES, SCORES, KERNELS = 64 * 32 * 13 * 13, 64 * 50 * 9 * 9, 50 * 32 * 5 * 5  # elements
OPERATORS = [
    ("convolution", "backward_weights", CONVOLUTION, 2 * 32 * 25 * SCORES, IMAGES + SCORES + KERNELS),
    ("convolution", "forward_training", f"g2{CONVOLUTION}", 32 * 25 * SCORES, IMAGES + SCORES + KERNELS // 2),
    ("inner_product", "backward_data", "mb64ic800oc128", 2 * 64 * 800 * 128, 64 * 800 + 64 * 128 + 800 * 128),
    ("pooling_v2", "backward_data", POOLING, 0, 64 * 32 * (26 * 26 + 13 * 13)),
    ("eltwise", "forward_training", "64x32x26x26", 0, 2 * 64 * 32 * 26 * 26),
    ("eltwise", "backward_data", "64x128", 0, 3 * 64 * 128),
    ("concat", "undef", "50x20x5x5:50x12x5x5", 0, 2 * KERNELS),
    ("batch_normalization", "backward", "mb2ic4ih28iw28", 0, 3 * 8 * 28**2),
]


@pytest.mark.parametrize("kind, way, problem, flop, elements", OPERATORS)
def test_an_operator_has_the_flop_of_its_products_and_the_bytes_of_its_arrays(kind, way, problem, flop, elements):
    line = f"dnnl_verbose,exec,cpu,{kind},jit:avx512_common,{way},{BLOCKED},,alg:any,{problem},0.5"
    assert roofline.parse(line)[1:] == (flop, 4 * elements, 0.5)


@pytest.mark.parametrize("text", ["", "dnnl_verbose,info,cpu,runtime:OpenMP", "epoch 1, time: 1.0 sec"])
def test_other_lines_are_no_operators(text):
    assert roofline.parse(text) is None


def test_a_measured_step_has_the_flop_of_lenet_and_no_operator_takes_longer_than_the_step():
    job = harness.Job("roofline", {"model": "lenet", "steps": 3}, roofline._environment())
    found = harness.start("LeNet", job)
    dense = sum(row["flop"] for row in found["operators"] if row["name"].startswith("dense"))
    # 128 examples; the forward pass and two gradients of both dense layers
    assert dense == pytest.approx(3 * 2 * 128 * (800 * 128 + 128 * 10))
    convolutions = sum(row["flop"] for row in found["operators"] if row["name"].startswith("convolution"))
    # With padded channels, it is more. The first convolution has no data gradient.
    assert convolutions >= 0.999 * 2 * 128 * (2 * 20 * 26**2 * 9 + 3 * 50 * 9**2 * 20 * 25)
    assert 0 < sum(row["ms"] for row in found["operators"]) < found["step_ms"]
    assert min(found["flops"], found["bytes_per_s"]) > 1e8
