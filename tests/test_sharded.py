"""Rings compute exact sums, and ZeRO-1 to ZeRO-3 agree with DDP's step bit for bit. test_steps.py compares all of them
with NumPy in float64."""

from functools import partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from reference import assert_close
from test_partition import LR, batch, contexts, parameters, recorded_copies

from gluon_mgpu import sharded

STEPS = (sharded.ddp, sharded.zero1, sharded.zero2, sharded.zero3)
BYTES = 4 * 129_068  # of LeNet's parameters
OPTIMIZERS = {"sgd": (partial(sharded.sgd, lr=LR), 1), "adam": (partial(sharded.adam, lr=0.001), 2)}


def place(ctx, zero, moments):
    """The weights and the optimizer's moments before the first step."""
    params = parameters()
    zeros = [nd.zeros_like(p) for p in params]
    weights = sharded.place(sharded.LENET, params, ctx, sharded=zero == 3)
    return weights, [sharded.place(sharded.LENET, zeros, ctx, sharded=zero > 0) for _ in range(moments)]


def train(devices, zero, optimizer):
    """The weights and the optimizer's moments after some steps, as NumPy arrays."""
    rule, count = OPTIMIZERS[optimizer]
    weights, moments = place(contexts(devices), zero, count)
    for seed, n in enumerate((9, 16, 8)):
        STEPS[zero](*batch(n, seed), sharded.LENET, weights, moments, contexts(devices), rule)
    arrays = sharded.collect(sharded.LENET, weights, sharded=zero == 3)
    for buckets in moments:
        arrays += sharded.collect(sharded.LENET, buckets, sharded=zero > 0)
    return [array.asnumpy() for array in arrays]


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
    weights, moments = place(ctx, zero, 1)
    X, y = (array.as_in_context(host) for array in batch(16))
    with recorded_copies() as copies:
        STEPS[zero](X, y, sharded.LENET, weights, moments, ctx, OPTIMIZERS["sgd"][0])
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


def test_sgd_has_momentum():
    rng = np.random.default_rng(5)
    p, velocity = (nd.array(rng.random(20)) for _ in range(2))
    p64, v64 = (array.asnumpy().astype(np.float64) for array in (p, velocity))
    for step in (1, 2, 3):
        grad = rng.random(20).astype(np.float32)
        sharded.sgd(p, nd.array(grad), velocity, 7, lr=0.1, momentum=0.9)
        v64 = 0.9 * v64 - 0.1 * (grad.astype(np.float64) / 7)  # the mean gradient for a batch of 7
        p64 = p64 + v64
        assert_close(p.asnumpy(), p64, 10 * step)


def test_adam_computes_what_its_paper_says():
    rng = np.random.default_rng(5)
    arrays = [nd.array(rng.random(20)) for _ in range(3)]
    p, mean, variance = (array.asnumpy().astype(np.float64) for array in arrays)
    for step in (1, 2, 3):
        grad = rng.random(20).astype(np.float32).astype(np.float64)
        lr = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        sharded.adam(arrays[0], nd.array(grad), *arrays[1:], 7, lr=lr)
        mean = 0.9 * mean + 0.1 * (grad / 7)  # the mean gradient for a batch of 7
        variance = 0.999 * variance + 0.001 * (grad / 7) ** 2
        p = p - lr * mean / (np.sqrt(variance) + 1e-8)
        for found, expected in zip(arrays, (p, mean, variance)):
            assert_close(found.asnumpy(), expected, 10 * step)


@pytest.mark.parametrize("step", STEPS)
def test_a_batch_with_fewer_examples_than_devices_is_refused_instead_of_letting_replicas_drift(step):
    with pytest.raises(AssertionError):
        step(nd.zeros((2, 1, 28, 28)), nd.zeros(2), sharded.LENET, *place(contexts(3), 0, 1), contexts(3), sharded.sgd)


def test_a_layer_with_fewer_numbers_than_devices_is_refused():
    net = [(lambda X, w: X * w, [(2,)])]
    sharded.place(net, [nd.ones(2)], contexts(2), sharded=True)
    with pytest.raises(AssertionError):
        sharded.place(net, [nd.ones(2)], contexts(3), sharded=False)
