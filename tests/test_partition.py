"""The three ways to split LeNet across devices, compared with NumPy in float64."""

from contextlib import contextmanager
from functools import cache, partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.ndarray import register
from reference import additions, assert_close, steps
from runs import ROOT, overlap

from gluon_mgpu import partition, scratch
from gluon_mgpu.support.errors import UsageError

LR = 0.2
SIZES = (7, 16, 4)  # batch sizes
NETWORK, LAYERS, DATA = partition.WAYS
WAYS = [(NETWORK, {}), (NETWORK, {"micro_batches": 3}), (LAYERS, {}), (DATA, {})]
each_way = pytest.mark.parametrize("way, options", WAYS, ids=[f"{way}{options or ''}" for way, options in WAYS])


def contexts(n):
    return [mx.cpu(i) for i in range(n)]


def parameters():
    """Large enough that every layer matters, biases included."""
    mx.random.seed(7)
    params = scratch.init_params(scale=0.1)
    for b in params[1::2]:
        b[:] = nd.random.normal(scale=0.1, shape=b.shape)
    return params


def batch(n, seed=3):
    """Images and labels."""
    rng = np.random.default_rng(seed)
    return nd.array(rng.random((n, 1, 28, 28))), nd.array(rng.integers(0, 10, n))


def start(way, options, devices):
    """A step as a function of X and y, and for each device the arrays that it works on."""
    place, train_batch = partition.WAYS[way]
    device_params = place(parameters(), contexts(devices))
    return partial(train_batch, device_params=device_params, ctx=contexts(devices), lr=LR, **options), device_params


def joined(way, device_params, read):
    """read(p) of all eight parameters, joined from all devices; for data parallelism, once for each device."""
    arrays = [[read(p).asnumpy() for p in params] for params in device_params]
    if way == NETWORK:
        return [sum(arrays, [])]
    if way == LAYERS:
        return [[np.concatenate(rows) for rows in zip(*arrays)]]
    return arrays


@cache
def float64_steps():
    """For each of SIZES: the losses and gradients of a step, and the parameters after it."""
    batches = [[array.asnumpy() for array in batch(n, seed)] for seed, n in enumerate(SIZES)]
    return [*steps([p.asnumpy() for p in parameters()], batches, LR)]


@each_way
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_three_steps_give_the_losses_gradients_and_parameters_of_float64(way, options, devices):
    (step, device_params), rounding = start(way, {}, devices), 0
    for (seed, n), (expected, gradients, params) in zip(enumerate(SIZES), float64_steps()):
        if seed == 2:  # without micro-batches; must not add the gradients of earlier steps
            options = {}
        losses = np.concatenate([part.asnumpy() for part in step(*batch(n, seed), **options)])
        rounding += additions(n)
        assert_close(losses, expected, rounding)
        for arrays, read in ((gradients, lambda p: p.grad), (params, lambda p: p)):
            for found in joined(way, device_params, read):
                assert len(found) == len(arrays)
                for a, b in zip(found, arrays):
                    assert_close(a, b, rounding)


@contextmanager
def recorded_copies():
    """A list of all copies between devices: (source, destination, bytes)."""
    copyto, copies = nd.NDArray.copyto, []

    def recording(array, other):
        destination = other if isinstance(other, mx.Context) else other.context
        if destination != array.context:
            copies.append((array.context, destination, array.size * array.dtype().itemsize))
        return copyto(array, other)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nd.NDArray, "copyto", recording)
        yield copies


WEIGHTS = 200 + 25050 + 102528 + 1290  # LeNet's parameters, by layer
MOVED = {  # float32 numbers per step of 256 examples, in both directions: docs/partition.md
    NETWORK: 2 * 256 * 20 * 13 * 13,
    LAYERS: 2 * 256 * (20 * 13 * 13 + 50 * 4 * 4 + 128 + 10 // 2),
    DATA: 2 * WEIGHTS,
}


@pytest.mark.parametrize("way", MOVED)
def test_a_step_copies_the_bytes_that_the_page_says_from_one_device_to_another(way):
    (step, _), host = start(way, {}, 2), mx.cpu(3)
    X, y = (array.as_in_context(host) for array in batch(256))
    with recorded_copies() as copies:
        step(X, y)
    moved = sum(size for source, _, size in copies if source != host)
    assert moved == 4 * MOVED[way] and f"| {moved / 1e6:.2f} |" in (ROOT / "docs/partition.md").read_text()


@each_way
def test_nothing_passes_between_devices_except_by_copyto(way, options, monkeypatch):
    invoke, backward, crossing = register._imperative_invoke, nd.NDArray.backward, []

    def checked(handle, arrays, keys, values, out, *rest):
        result = invoke(handle, arrays, keys, values, out, *rest)
        sources = {array.context for array in arrays}
        assert len(sources) <= 1, f"an operator reads from {sources}"  # this would work only on CPU contexts
        results = result if isinstance(result, (list, tuple)) else [result]
        crossing.extend(r for r in results if sources and r.context not in sources)
        return result

    def checked_backward(head, out_grad=None, *rest):
        assert out_grad is None or out_grad.context == head.context
        backward(head, out_grad, *rest)

    step, _ = start(way, options, 3)
    monkeypatch.setattr(register, "_imperative_invoke", checked)
    monkeypatch.setattr(nd.NDArray, "backward", checked_backward)
    with recorded_copies() as copies:
        step(*batch(7))
    assert len(crossing) == len(copies) > 0


PIPELINE = """
    device_params = partition.partition_network(scratch.init_params(), ctx)
    step = lambda: partition.train_batch_network(X, y, device_params, ctx, 0.1, {})
"""


@pytest.mark.slow
def test_the_devices_of_network_partitioning_take_turns_and_overlap_with_micro_batches():
    operators = ("Convolution", "FullyConnected", "_backward_Convolution", "_backward_FullyConnected")
    assert overlap(PIPELINE.format(1), operators) == 0
    assert overlap(PIPELINE.format(4), operators) > 0


@pytest.mark.parametrize("way, devices", [(NETWORK, 5), (LAYERS, 11)])
def test_more_devices_than_parts_are_a_usage_error(way, devices):
    with pytest.raises(UsageError):
        partition.WAYS[way][0](parameters(), contexts(devices))
