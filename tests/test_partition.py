"""The ways to split LeNet across devices, compared with NumPy in float64."""

from contextlib import contextmanager
from functools import cache, partial

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from mxnet.ndarray import register
from reference import additions, assert_close, steps
from runs import ROOT, overlap

from gluon_mgpu import hybrid, partition, scratch
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


@contextmanager
def refused_crossings():
    """Fail if anything passes between devices except by copyto: other ways work only on CPU contexts."""
    invoke, backward, crossing = register._imperative_invoke, nd.NDArray.backward, []

    def checked(handle, arrays, keys, values, out, *rest):
        result = invoke(handle, arrays, keys, values, out, *rest)
        sources = {array.context for array in arrays}
        assert len(sources) <= 1, f"an operator reads from {sources}"
        results = result if isinstance(result, (list, tuple)) else [result]
        crossing.extend(r for r in results if sources and r.context not in sources)
        return result

    def checked_backward(head, out_grad=None, *rest):
        assert out_grad is None or out_grad.context == head.context
        backward(head, out_grad, *rest)

    with pytest.MonkeyPatch.context() as patched, recorded_copies() as copies:
        patched.setattr(register, "_imperative_invoke", checked)
        patched.setattr(nd.NDArray, "backward", checked_backward)
        yield
    assert len(crossing) == len(copies) > 0


@each_way
def test_nothing_passes_between_devices_except_by_copyto(way, options):
    step, _ = start(way, options, 3)
    with refused_crossings():
        step(*batch(7))


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


def mesh_of(rows, columns):
    """A mesh, and parameters on it."""
    mesh = [[mx.cpu(row * columns + column) for column in range(columns)] for row in range(rows)]
    return mesh, hybrid.place(parameters(), mesh)


def whole(row, read):
    """read(p) of all eight parameters, joined from the devices of a row of a mesh."""
    parts = [[read(p).asnumpy() for p in of_devices] for of_devices in zip(*row)]
    joined = {i: np.concatenate(parts[i], axis) for i, axis in {4: 0, 5: 0, 6: 1}.items()}  # W3, b3 and W4
    return [joined.get(i, part[0]) for i, part in enumerate(parts)]


@pytest.mark.parametrize(
    "rows, columns",
    [(2, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in [(1, 1), (1, 4), (3, 1), (2, 3)])],
)
def test_three_steps_on_a_mesh_give_the_losses_gradients_and_parameters_of_float64(rows, columns):
    (mesh, mesh_params), rounding = mesh_of(rows, columns), 0
    for (seed, n), (expected, gradients, params) in zip(enumerate(SIZES), float64_steps()):
        losses = hybrid.train_batch(*batch(n, seed), mesh_params, mesh, LR)
        rounding += additions(n)
        assert_close(np.concatenate([part.asnumpy() for part in losses]), expected, rounding)
        for row in mesh_params:
            for a, b in zip(whole(row, lambda p: p.grad) + whole(row, lambda p: p), gradients + params):
                assert_close(a, b, rounding)


def test_devices_of_a_column_stay_equal_and_devices_of_a_row_in_what_is_not_split():
    mesh, mesh_params = mesh_of(2, 2)
    for seed, n in enumerate(SIZES):
        hybrid.train_batch(*batch(n, seed), mesh_params, mesh, LR)
    for i in range(8):
        [a, b], [c, d] = [[params[i].asnumpy() for params in row] for row in mesh_params]
        assert np.array_equal(a, c) and np.array_equal(b, d)
        assert np.array_equal(a, b) == (i not in (4, 5, 6))


def test_nothing_passes_between_devices_of_a_mesh_except_by_copyto():
    mesh, mesh_params = mesh_of(2, 2)
    with refused_crossings():
        hybrid.train_batch(*batch(7), mesh_params, mesh, LR)


@pytest.mark.parametrize("rows, columns", [(2, 2), (1, 4), (4, 1)])
def test_the_groups_of_a_mesh_copy_the_bytes_that_the_page_says(rows, columns):
    (mesh, mesh_params), images = mesh_of(rows, columns), 256 * 28 * 28 * 4
    with recorded_copies() as copies:
        hybrid.train_batch(*batch(256), mesh_params, mesh, LR)
    copies = [copy for copy in copies if copy[2] not in (images // rows, 256 * 4 // rows)]  # the batch itself
    places = {device: (r, c) for r, row in enumerate(mesh) for c, device in enumerate(row)}
    of_row, of_column = (
        sum(size for a, b, size in copies if places[a][axis] == places[b][axis] == 0) for axis in (0, 1)
    )
    total = sum(size for *_, size in copies)
    page = (ROOT / "docs/hybrid.md").read_text()
    assert total == rows * of_row + columns * of_column
    assert all(f"{size / 1e6:.2f} MB" in page for size in (of_row, of_column, total) if size)
