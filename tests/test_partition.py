"""The three ways to split LeNet over devices: against one device, NumPy in float64, and counts made by hand."""

import json
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from functools import partial

import mxnet as mx
import numpy as np
import pytest
from bench import partition as bench
from mxnet import nd
from mxnet.ndarray import register
from test_step import losses_float64

from gluon_mgpu import partition, scratch
from gluon_mgpu.runtime.errors import UsageError

LR = 0.2
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


def batch(n, seed=3, ctx=None):
    rng = np.random.default_rng(seed)
    X, y = rng.random((n, 1, 28, 28)), rng.integers(1, 10, n)  # no label 0, as which one that is left out would pass
    return nd.array(X, ctx=ctx), nd.array(y, ctx=ctx)


def start(way, options, devices):
    """A step of a way, from X and y, and the arrays that it works on, a list a device."""
    place, train_batch = partition.WAYS[way]
    device_params = place(parameters(), contexts(devices), **options)
    step = partial(train_batch, device_params=device_params, ctx=contexts(devices), lr=LR, **options)
    return step, device_params


def whole(way, device_params, read):
    """The eight arrays that read gives of the parameters, put together from all devices; of data parallelism each
    device's eight."""
    arrays = [[read(p).asnumpy() for p in params] for params in device_params]
    if way == NETWORK:
        return [sum(arrays, [])]
    if way == LAYERS:
        return [[np.concatenate(rows) for rows in zip(*arrays)]]
    return arrays


def steps_agree(way, options, devices, sizes):
    """Take a step on each of several batches, on one device too; fails where they differ by more than rounding."""
    step, device_params = start(way, options, devices)
    step_of_one, (params_of_one,) = start(DATA, {}, 1)
    for seed, n in enumerate(sizes):
        X, y = batch(n, seed)
        losses, [expected] = step(X, y), step_of_one(X, y)
        np.testing.assert_allclose(np.concatenate([part.asnumpy() for part in losses]), expected.asnumpy(), rtol=1e-4)
        for read in (lambda p: p.grad, lambda p: p):
            for arrays in whole(way, device_params, read):
                assert len(arrays) == len(params_of_one)
                for found, p in zip(arrays, params_of_one):
                    right = read(p).asnumpy()
                    assert np.abs(right).max() > 0
                    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


@each_way
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_three_steps_on_several_devices_give_the_losses_gradients_and_parameters_of_one(way, options, devices):
    steps_agree(way, options, devices, sizes=(7, 16, 2))


@pytest.fixture(scope="module")
def numerical():
    """{(which of the eight, index): gradient of the summed loss of batch(4)}, and its losses, in float64."""
    X, y = (data.asnumpy() for data in batch(4))
    X, y, exact = X.astype(np.float64), y.astype(int), [p.asnumpy().astype(np.float64) for p in parameters()]
    rng, step, gradients = np.random.default_rng(0), 1e-6, {}
    for which, values in enumerate(exact):
        for index in rng.choice(values.size, min(12, values.size), replace=False):
            at = np.unravel_index(index, values.shape)
            kept, sums = values[at], []
            for moved in (kept + step, kept - step):
                values[at] = moved
                sums.append(losses_float64(X, y, exact).sum())
            values[at] = kept
            gradients[which, at] = (sums[0] - sums[1]) / (2 * step)
    return losses_float64(X, y, exact), gradients


@each_way
def test_losses_and_gradients_agree_with_numerical_differentiation_in_float64(way, options, numerical):
    losses, gradients = numerical
    step, device_params = start(way, options, 2)
    np.testing.assert_allclose(np.concatenate([part.asnumpy() for part in step(*batch(4))]), losses, rtol=1e-5)
    for found in whole(way, device_params, lambda p: p.grad):
        for (which, at), gradient in gradients.items():
            largest = float(np.abs(found[which]).max())
            assert found[which][at] == pytest.approx(gradient, rel=1e-3, abs=1e-4 * largest)


@contextmanager
def left_out(which):
    """The copy between devices of that number, from 0, does not arrive: a new array is zeros, an old one stays."""
    copyto, seen = nd.NDArray.copyto, []

    def copyto_but_one(array, other):
        destination = other if isinstance(other, mx.Context) else other.context
        seen.append(destination != array.context)
        if not seen[-1] or sum(seen) != which + 1:
            return copyto(array, other)
        return nd.zeros(array.shape, ctx=other) if isinstance(other, mx.Context) else other

    nd.NDArray.copyto = copyto_but_one
    try:
        yield
    finally:
        nd.NDArray.copyto = copyto


@each_way
@pytest.mark.parametrize("devices", [2, 3])
def test_a_step_in_which_any_one_exchange_is_left_out_is_not_the_step_of_one_device(way, options, devices):
    with bench.counted_copies() as copies:
        step, _ = start(way, options, devices)
        before = len(copies)  # by which the parameters were placed
        step(*batch(5))
    steps_agree(way, options, devices, sizes=(5,))
    for which in range(before, len(copies)):
        with left_out(which), pytest.raises(AssertionError):
            steps_agree(way, options, devices, sizes=(5,))


PARAMETERS = (20 * 1 * 3 * 3 + 20) + (50 * 20 * 5 * 5 + 50) + (128 * 800 + 128) + (10 * 128 + 10)
BETWEEN_LAYERS = [20 * 13 * 13, 50 * 4 * 4, 128]  # numbers an example


def bytes_by_hand(way, n, devices):
    """Float32 numbers of 4 bytes that a step moves: (between devices, from the host)."""
    others, images, labels = devices - 1, n * 28 * 28, n
    if way == DATA:  # each other device sends its gradients to the first, which sends the sum back
        return 4 * 2 * others * PARAMETERS, 4 * (images + labels)
    if way == NETWORK:  # an activation forward and its gradient back, at each of the cuts
        return 4 * 2 * n * sum(BETWEEN_LAYERS[:others]), 4 * (images + labels)
    # Each device sends its channels to all others, and gets a gradient of them from each. The scores and their
    # gradients pass between the first device and each other one only; its own are 10 / k of them, rounded up.
    scores = 10 - -(-10 // devices)
    return 4 * 2 * n * (others * sum(BETWEEN_LAYERS) + scores), 4 * (devices * images + labels)


@each_way
@pytest.mark.parametrize("n, devices", [(8, 1), (8, 2), (7, 2), (5, 3), (3, 4)])
def test_the_counted_bytes_are_those_that_the_shapes_give(way, options, n, devices):
    step, _ = start(way, options, devices)
    host = mx.cpu(devices)
    X, y = batch(n, ctx=host)
    with bench.counted_copies() as copies:
        step(X, y)
    sums = bench._sums(copies, host)
    assert (sums["bytes_between_devices"], sums["bytes_from_host"]) == bytes_by_hand(way, n, devices)


@each_way
def test_nothing_passes_between_devices_but_by_the_copies_that_are_counted(way, options, monkeypatch):
    invoke, backward, crossing = register._imperative_invoke, nd.NDArray.backward, []

    def checked(handle, arrays, keys, values, out, *rest):
        result = invoke(handle, arrays, keys, values, out, *rest)
        given = {array.context for array in arrays}
        assert len(given) <= 1, f"an operator reads from {given}"  # MXNet computes so on CPU contexts without a word
        results = result if isinstance(result, (list, tuple)) else [result]
        crossing.extend(r for r in results if given and r.context not in given)
        return result

    def checked_backward(head, out_grad=None, *rest):
        assert out_grad is None or out_grad.context == head.context
        backward(head, out_grad, *rest)

    step, _ = start(way, options, 3)
    monkeypatch.setattr(register, "_imperative_invoke", checked)
    monkeypatch.setattr(nd.NDArray, "backward", checked_backward)
    with bench.counted_copies() as copies:
        step(*batch(7))
    assert len(crossing) == len(copies) > 0


PIPELINE = """
    import json, sys, gluon_mgpu
    gluon_mgpu.configure(2)
    import mxnet as mx
    from mxnet import nd, profiler
    from gluon_mgpu import partition, scratch
    ctx, micro_batches = [mx.cpu(0), mx.cpu(1)], int(sys.argv[2])
    device_params = partition.partition_network(scratch.init_params(), ctx, micro_batches)
    X, y = nd.random.uniform(shape=(256, 1, 28, 28)), nd.zeros(256)
    step = lambda: partition.train_batch_network(X, y, device_params, ctx, 0.1, micro_batches)
    step()
    nd.waitall()
    profiler.set_config(profile_imperative=True, filename=sys.argv[1])
    profiler.set_state("run")
    for _ in range(4):
        step()
    nd.waitall()
    profiler.set_state("stop")
    profiler.dump()
    spans, began = {0: [], 1: []}, {}
    for event in json.load(open(sys.argv[1]))["traceEvents"]:
        if event.get("name") in ("Convolution", "ImperativeBulk"):  # forward, and a backward pass
            if event["ph"] == "B":
                began[event["pid"]] = event["ts"]
            elif event["ph"] == "E":
                spans[event["pid"]].append((began.pop(event["pid"]), event["ts"]))
    assert len(spans[0]) == 8 * micro_batches, spans
    print(sum(max(0, min(b, d) - max(a, c)) for a, b in spans[0] for c, d in spans[1]))
"""


def test_devices_of_a_partitioned_network_work_in_turn_and_overlap_with_micro_batches(tmp_path):
    overlap = {}
    for micro_batches in (1, 4):
        command = [sys.executable, "-c", textwrap.dedent(PIPELINE), tmp_path / "profile.json", str(micro_batches)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(bench.machine.SETTINGS)}
        done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        overlap[micro_batches] = int(done.stdout)  # microseconds
    assert overlap[1] == 0 < overlap[4]


@pytest.mark.parametrize(
    "way, devices, said",
    [(NETWORK, 5, "network partitioning on 5 devices"), (LAYERS, 11, "layer-wise partitioning on 11 devices")],
)
def test_more_devices_than_there_is_to_share_are_refused_in_one_line(way, devices, said):
    with pytest.raises(UsageError) as refused:
        partition.WAYS[way][0](parameters(), contexts(devices))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_copies_within_a_context_are_not_counted_and_those_into_an_array_are():
    x = nd.ones((3, 5), ctx=mx.cpu(0))
    there = nd.zeros((3, 5), ctx=mx.cpu(1))
    with bench.counted_copies() as copies:
        x.copyto(mx.cpu(0))
        x.as_in_context(mx.cpu(0))
        x.as_in_context(mx.cpu(1))
        x[:2].astype("float64").copyto(mx.cpu(2))
        x.copyto(there)
        there[:] = x
        x[1:] = there[1:]
    x.copyto(mx.cpu(1))
    zero, one, two = contexts(3)
    assert copies == [(zero, one, 60), (zero, two, 80), (zero, one, 60), (zero, one, 60), (one, zero, 40)]


def events(pid, *spans, worker=1):
    return [
        {"name": "x", "ph": phase, "pid": pid, "tid": worker, "ts": ts}
        for span in spans
        for phase, ts in zip("BE", span)
    ]


def test_idle_is_what_no_operator_of_a_device_covers_from_the_first_to_the_last_of_any():
    trace = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "cpu pinned/"}},
        *events(0, (1100, 1200), (1200, 1250), (1400, 1500)),  # 250 of 1000
        *events(1, (1000, 1600)),
        *events(1, (1500, 1550), (1590, 2000), worker=2),  # with the other worker's, 1000 to 2000
        *events(2, (0, 9000)),  # neither of the two
        *[{**event, "ph": event["ph"].lower()} for event in events(0, (0, 9000))],  # no operator on a worker
    ]
    assert bench.idle_shares(trace, 2) == pytest.approx([0.75, 0.0])


RESULT = {
    "batch_size": 256,
    "rounds": 3,
    "steps": 100,
    "ways": [
        {
            "name": "one device, one thread",
            "devices": 1,
            "step_ms": [40.0, 50.0, 48.0],
            "idle": [[0.0], [0.02], [0.01]],
            "bytes_between_devices": 0,
            "bytes_from_host": 803840,
        },
        {
            "name": "data parallelism",
            "devices": 2,
            "step_ms": [30.0, 25.0, 26.5],
            "idle": [[0.1, 0.5], [0.2, 0.3], [0.15, 0.4]],
            "bytes_between_devices": 1032544,
            "bytes_from_host": 803840,
        },
    ],
}


def test_the_table_shows_medians_and_the_spread_of_times_and_each_devices_idle_share():
    title, _, one, data = bench.table(RESULT).splitlines()
    assert title.startswith("LeNet split over devices, train, batch 256") and title.endswith(bench.machine.line())
    assert one.split()[-5:] == ["48.0", "(40.0-50.0)", "0.000", "0.804", "1"]
    assert data.split()[-6:] == ["26.5", "(25.0-30.0)", "1.033", "0.804", "15", "40"]


def test_a_measured_way_has_a_time_the_bytes_by_hand_and_an_idle_share_of_each_device(monkeypatch, tmp_path):
    subject = bench.Subject(NETWORK, micro_batches=4)
    monkeypatch.setattr(bench, "SUBJECTS", (subject,))
    result = json.loads(json.dumps(bench.run(rounds=1, steps=2)))
    [way] = result["ways"]
    assert way["name"] == "network partitioning, 4 micro-batches" and way["step_ms"][0] > 1
    between, from_host = bytes_by_hand(NETWORK, 256, 2)
    assert (way["bytes_between_devices"], way["bytes_from_host"]) == (between, from_host)
    [idle] = way["idle"]
    assert len(idle) == 2 and all(0 < share < 1 for share in idle)
    assert idle[0] > idle[1]  # the second convolution is the second device's
    bench.draw(result, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
