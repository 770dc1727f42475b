"""The work of each operator that oneDNN prints, checked against sums by hand and against a real step."""

import pytest
from bench import harness, roofline
from bench.roofline import Operator

BLOCKED = "src_f32::blocked:aBcd16b:f0 wei_f32::blocked:ABcd16b16a:f0 bia_f32::blocked:a:f0 dst_f32::blocked:aBcd16b:f0"
POOLING = "mb64ic32_ih26oh13kh2sh2dh0ph0_iw26ow13kw2sw2dw0pw0"
CONVOLUTION = "mb64_ic32oc50_ih13oh9kh5sh1dh0ph0_iw13ow9kw5sw1dw0pw0"


def line(kind, way, problem, ms=0.5):
    return f"dnnl_verbose,exec,cpu,{kind},jit:avx512_common,{way},{BLOCKED},,alg:any,{problem},{ms}"


@pytest.mark.parametrize(
    "text, name, flop, elements",
    [
        (
            line("convolution", "backward_weights", CONVOLUTION),
            "convolution 5x5, 32 to 50, weight gradient",
            2 * 64 * 50 * 9 * 9 * 32 * 5 * 5,
            64 * 32 * 13 * 13 + 64 * 50 * 9 * 9 + 50 * 32 * 5 * 5,
        ),
        (
            line("convolution", "forward_training", f"g2{CONVOLUTION}"),
            "convolution 5x5, 32 to 50, forward",
            64 * 50 * 9 * 9 * 32 * 5 * 5,
            64 * 32 * 13 * 13 + 64 * 50 * 9 * 9 + 50 * 16 * 5 * 5,
        ),
        (
            line("inner_product", "backward_data", "mb64ic800oc128"),
            "dense, 800 to 128, data gradient",
            2 * 64 * 800 * 128,
            64 * 800 + 64 * 128 + 800 * 128,
        ),
        (line("pooling_v2", "backward_data", POOLING), "pooling, backward", 0, 64 * 32 * (26 * 26 + 13 * 13)),
        (line("eltwise", "forward_training", "64x32x26x26"), "eltwise, forward", 0, 2 * 64 * 32 * 26 * 26),
        (line("eltwise", "backward_data", "64x128"), "eltwise, backward", 0, 3 * 64 * 128),
        (line("concat", "undef", "50x20x5x5:50x12x5x5"), "concat", 0, 2 * 50 * 32 * 5 * 5),
        (line("batch_normalization", "backward", "mb2ic4ih28iw28"), "batch normalization, backward", 0, 3 * 8 * 28**2),
    ],
)
def test_an_operator_has_the_flop_of_its_products_and_the_bytes_of_its_arrays(text, name, flop, elements):
    assert roofline.parse(text) == Operator(name, flop, 4 * elements, 0.5)


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
    table = roofline.table({"models": {"lenet": found}})
    assert "% of step" in table and "outside oneDNN" in table
