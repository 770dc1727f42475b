"""Rings compute exact sums, and ZeRO-1 to ZeRO-3 agree with DDP's step bit for bit. test_steps.py compares all of them
with NumPy in float64."""

from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from reference import additions, assert_close
from test_partition import LR, batch, contexts, parameters, recorded_copies

from gluon_mgpu import sharded
from gluon_mgpu import train as training
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import create_model

STEPS = (sharded.ddp, sharded.zero1, sharded.zero2, sharded.zero3)
BYTES = 4 * 129_068  # of LeNet's parameters
OPTIMIZERS = {"sgd": (partial(sharded.sgd, lr=LR), 1), "adam": (partial(sharded.adam, lr=0.001), 2)}


def place(ctx, zero, moments):
    """The state before the first step."""
    params = parameters()
    zeros = [nd.zeros_like(p) for p in params]
    parts = [(params, zero == 3), *[(zeros, zero > 0)] * moments]
    return [sharded.place(sharded.LENET, arrays, ctx, is_sharded) for arrays, is_sharded in parts]


def train(devices, zero, optimizer):
    """The weights and the optimizer's moments after some steps, as NumPy arrays."""
    rule, moments = OPTIMIZERS[optimizer]
    state = place(contexts(devices), zero, moments)
    for seed, n in enumerate((9, 16, 8)):
        STEPS[zero](*batch(n, seed), sharded.LENET, state, contexts(devices), rule)
    is_sharded = [zero == 3, *[zero > 0] * moments]
    return [a.asnumpy() for part, is_s in zip(state, is_sharded) for a in sharded.collect(sharded.LENET, part, is_s)]


@pytest.mark.parametrize("n, devices", [(8, 8), (30, 4), (65, 3), (7, 1), (65, 8)])
def test_the_halves_of_a_ring_compute_exact_sums(devices, n):
    values = np.random.default_rng(n).integers(-99, 99, (devices, n)).astype(np.float32)
    data = [nd.array(row, ctx=c) for row, c in zip(values, contexts(devices))]
    chunks = sharded.reduce_scatter(data)
    assert [chunk.context for chunk in chunks] == contexts(devices)
    assert {chunk.size for chunk in chunks} <= {n // devices, -(-n // devices)}
    np.testing.assert_array_equal(np.concatenate([chunk.asnumpy() for chunk in chunks]), values.sum(0))
    new = [nd.empty(n, c) for c in contexts(devices)]
    for gathered in (sharded.all_gather(chunks, out=new), sharded.all_gather(chunks, out=data)):
        for vector in gathered:
            np.testing.assert_array_equal(vector.asnumpy(), values.sum(0))


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("zero, halves", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_device_sends_its_part_of_the_parameters_once_per_half_of_a_ring(zero, halves, devices):
    ctx, host = contexts(devices), mx.cpu(9)
    state = place(ctx, zero, 1)
    X, y = (array.as_in_context(host) for array in batch(16))
    with recorded_copies() as copies:
        STEPS[zero](X, y, sharded.LENET, state, ctx, OPTIMIZERS["sgd"][0])
    for i, c in enumerate(ctx):
        between = [(target, size) for source, target, size in copies if source == c]
        assert {target for target, _ in between} <= {ctx[(i + 1) % devices]}
        rounding = 4 * len(sharded.LENET) * halves  # a chunk is up to one float32 larger than its part
        assert abs(sum(size for _, size in between) - halves * BYTES * (devices - 1) / devices) <= rounding


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", [1, 3])
def test_zero_trains_as_ddp_does_bit_for_bit(devices, optimizer):
    expected, *others = [train(devices, zero, optimizer) for zero in range(4)]
    assert not np.array_equal(expected[0], parameters()[0].asnumpy())
    for found in others:
        for a, b in zip(found, expected):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_optimizers_compute_what_their_papers_say(optimizer):
    rng = np.random.default_rng(5)
    p, *moments = (nd.array(rng.random(20)) for _ in range(1 + OPTIMIZERS[optimizer][1]))
    p64, *m64 = (a.asnumpy().astype(np.float64) for a in (p, *moments))
    for step in (1, 2, 3):
        grad = rng.random(20).astype(np.float32)
        mean = grad.astype(np.float64) / 7  # the mean gradient for a batch of 7
        if optimizer == "sgd":
            sharded.sgd(p, nd.array(grad), *moments, 7, lr=0.1)
            m64[0] = 0.9 * m64[0] - 0.1 * mean
            p64 += m64[0]
        else:
            correction = np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            sharded.adam(p, nd.array(grad), *moments, 7, lr=0.1 * correction)
            m64 = [0.9 * m64[0] + 0.1 * mean, 0.999 * m64[1] + 0.001 * mean**2]
            p64 -= 0.1 * correction * m64[0] / (np.sqrt(m64[1]) + 1e-8)
        for a, b in zip((p, *moments), (p64, *m64)):
            assert_close(a.asnumpy(), b, 10 * step)


def run(folder, impl, devices, epochs=1, **options):
    """The arrays of the checkpoint after training or, if the folder holds a run, after continuing it."""
    if folder.exists():
        training(impl=impl, gpus=devices, epochs=epochs, resume=folder, **options)
    else:
        same = {"batch_size": 32, "lr": 0.05, "momentum": 0.9, "seed": 1, "dataset": "synthetic", "limit": 128}
        training(impl, devices, epochs=epochs, device="cpu", out=folder, **same, **options)
    return checkpoint.load(folder / "checkpoint.npz")[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return run(tmp_path_factory.mktemp("highlevel") / "run", "highlevel", 2, epochs=2)


ZERO_1, ZERO_3 = ({"impl": "sharded", "zero": zero} for zero in (1, 3))
HIGHLEVEL = {"impl": "highlevel"}


@pytest.mark.parametrize("first, then", [(HIGHLEVEL, ZERO_3), (ZERO_3, ZERO_1), (ZERO_3, HIGHLEVEL)], ids=str)
def test_another_lesson_or_stage_of_zero_continues_a_run(first, then, expected, tmp_path):
    run(tmp_path / "run", devices=2, **first)
    found = run(tmp_path / "run", devices=3, epochs=2, **then)
    for name, array in expected.items():
        assert_close(found[name], array, additions(32) ** 0.5 * 8)  # the random errors of 8 steps


def test_with_zero_3_predict_gathers_the_weights_once_per_step_and_only_on_the_device_that_asks():
    ctx, asking = contexts(3), contexts(2)
    model = create_model("sharded", ctx, Config(impl="sharded", zero=3))
    Xs = [batch(4)[0].as_in_context(c) for c in asking]
    for _ in range(2):
        model.step(*batch(9), 0.1)
        with recorded_copies() as copies:
            for X in Xs * 3:
                model.predict(X)
        rounding = 4 * len(sharded.LENET)
        for c in ctx:
            received = sum(size for _, target, size in copies if target == c)
            assert abs(received - (BYTES * 2 / 3 if c in asking else 0)) <= rounding
