"""Tests of the harness; benchmark results are compared with NumPy, with values computed by hand, and with messages.

mxnet is imported here, so torch is not: it runs in separate processes. Tests that need torch are skipped if it is
missing.
"""

import importlib.util
import json
import sys

import mxnet as mx
import numpy as np
import pytest
import runs
from bench import allreduce, asynchrony, batch, distributed, harness, model, roofline, scaling, steps
from bench.harness import Job
from bench.partition import bytes_moved
from mxnet import nd
from runs import finished, program
from test_partition import recorded_copies

from gluon_mgpu import highlevel, partition, scratch
from gluon_mgpu.data import datasets

SHAPES = [(20, 1, 3, 3), (7,), (1,), (3, 5), (1001,), (40, 333)]
EPSILON = np.finfo(np.float32).eps


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("shapes", [SHAPES, [(10007,)]], ids=["many", "flat"])
def test_every_allreduce_leaves_numpys_sum_on_every_context(k, shapes):
    rng = np.random.default_rng(k)
    values = [rng.normal(size=(k, *shape)).astype(np.float32) for shape in shapes]
    for way in allreduce.WAYS:
        arrays = [[mx.nd.array(x, mx.cpu(i)) for i, x in enumerate(data)] for data in values]
        sum_all = allreduce.ways(arrays)[way]
        sum_all()
        sum_all()  # again: k times the sum
        for data, value in zip(arrays, values):
            exact, size = k * value.astype(np.float64).sum(0), k * np.abs(value).sum(0)
            for i, x in enumerate(data):
                assert (x.context, x.shape) == (mx.cpu(i), value.shape[1:]), way
                assert (np.abs(x.asnumpy() - exact) <= 2 * k * EPSILON * size).all(), way
                assert (x.asnumpy() == data[0].asnumpy()).all(), f"{way}: {x.context} differs in rounding"


def test_a_ratio_of_asynchrony_is_of_one_round_and_a_rate_of_the_median():
    facts = {"devices": ["cpu(0)", "cpu(1)"], "names": "x", "size": 1000, "products": 10}
    rows = {asynchrony.CALLS: [0.5, 0.1, 1], asynchrony.BASE: [2, 1, 5]}
    rows.update(zip(asynchrony.ALL_DEVICES, ([6, 2, 9], [2, 3, 2])))
    lines = asynchrony.table({**facts, "rows": rows}).splitlines()
    found = [next(line for line in lines if line.startswith(name))[len(name) :].split()[2:] for name in rows]
    # One device: 10 products of 2 GFLOP in the median's 2 s. Ratios: 0.5/2, 0.1/1, 1/5 -> 0.2; 6/2, 2/1, 9/5 -> 2;
    # 2/2, 3/1, 2/5 -> 1. Both devices: 20 products in 6 s and in 2 s.
    assert found == [["0.20"], ["10.0", "1.00"], ["6.7", "2.00"], ["20.0", "1.00"]]


def test_without_the_allreduce_each_replica_trains_on_its_own_shard(monkeypatch):
    made, build = [], harness.replicas
    monkeypatch.setattr(harness, "replicas", lambda *args, **options: made.append(build(*args, **options)) or made[-1])
    for subject in batch.compared("lenet", 256)[2:]:
        steps.trainer(subject)(datasets.synthetic(512, 100, seed=0), np.arange(512))
        first, second = ([array.asnumpy() for array in arrays.values()] for arrays in made[-1].arrays)
        assert all(map(np.array_equal, first, second)) == subject.exchange


@pytest.mark.parametrize("size, contexts, cores", [(256, 4, 2), (256, 2, 4), (8 * 256, 8, 2)])
def test_efficiency_is_the_speed_relative_to_one_context_per_core_in_use(size, contexts, cores):
    one = {"contexts": 1, "batch_size": 256, "step_ms": [40, 400]}
    many = {"contexts": contexts, "batch_size": size, "step_ms": [30, 300]}
    expected = size / 256 * 40 / 30 / 2  # 2 of 4 contexts have a core, or 2 of 4 cores have a context
    assert scaling.efficiencies(one, many, cores) == pytest.approx([expected] * 2)


@pytest.mark.parametrize("kvstore", runs.ENGINES)
@pytest.mark.parametrize("exchange, copies", [(True, 1), pytest.param(False, 0, marks=pytest.mark.slow)])
def test_a_step_sends_and_receives_each_gradient_once_and_nothing_without_the_exchange(kvstore, exchange, copies):
    job = distributed.job(kvstore, exchange=exchange, impl="scratch", model="lenet", steps=10)
    found = harness.start("it", job)
    for name in ("sent_bytes", "received_bytes"):
        assert copies <= found[name] / (4 * (200 + 25050 + 102528 + 1290)) < copies + 0.05, name  # LeNet's layers
    assert found["step_ms"] > 1


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


def test_each_round_measures_every_subject_once_and_ratios_are_those_of_runs_of_one_round(monkeypatch):
    times = {"notebook": [60, 30, 90], "scratch": [20, 10, 45], "highlevel": [20, 20, 20]}
    left, started = {name: iter(ms) for name, ms in times.items()}, []

    def start(name, job):
        started.append(name)
        return {"step_ms": next(left[name])}

    monkeypatch.setattr(harness, "start", start)
    measured = harness.measure(dict.fromkeys(times, Job("it", {})), rounds=3)
    assert started == [*times] * 3 and measured == {name: {"step_ms": ms} for name, ms in times.items()}
    assert harness.ratios(measured["notebook"], measured["scratch"]) == [3, 3, 2]


@pytest.mark.parametrize("way", partition.WAYS)
@pytest.mark.parametrize("devices, n", [(1, 8), (2, 8), (2, 7), (3, 5)])
def test_the_bytes_are_those_of_the_copies_that_a_step_makes(way, devices, n):
    ctx, host = [mx.cpu(i) for i in range(devices)], mx.cpu(devices)
    place, train_batch = partition.WAYS[way]
    device_params = place(scratch.init_params(), ctx)
    X, y = nd.ones((n, 1, 28, 28), ctx=host), nd.ones(n, ctx=host)
    with recorded_copies() as copies:
        train_batch(X, y, device_params, ctx, 0.1)
    assert bytes_moved(way, devices, n) == sum(size for source, _, size in copies if source != host)


MACHINE = {"cores": 2, "cpu": "Some CPU"}
CONTEXT_MS, EXAMPLE_MS, SHARED_MS = {"lenet": 1.5, "resnet18": 12.0}, {"lenet": 0.18, "resnet18": 13.0}, 0.02


def measured():
    """scaling.json of a machine on which a step takes exactly as long as the model says."""
    points = []
    for impl, of, size in (("scratch", "lenet", 256), ("highlevel", "lenet", 256), ("highlevel", "resnet18", 64)):
        for kind in ("strong", "weak"):
            for k in (1, 2, 4, 8):
                examples = size * k if kind == "weak" else size
                working = min(MACHINE["cores"], k)
                ms = (k * CONTEXT_MS[of] + examples * (EXAMPLE_MS[of] + SHARED_MS * (working - 1))) / working
                run = {"impl": impl, "model": of, "kind": kind, "contexts": k, "batch_size": examples}
                points.append({**run, "step_ms": [0.9 * ms, ms, 1.1 * ms]})  # the median counts
    return {"machine": MACHINE, "rounds": 3, "runs": points}


def test_the_fit_finds_the_parameters_that_made_the_points(tmp_path):
    (tmp_path / "scaling.json").write_text(json.dumps(measured()))
    result = model.run(tmp_path)
    assert set(result["steps"]) == {"scratch, LeNet", "highlevel, LeNet", "highlevel, ResNet-18"}
    for name, found in result["steps"].items():
        of = "lenet" if "LeNet" in name else "resnet18"
        assert found["terms"] == pytest.approx([CONTEXT_MS[of], EXAMPLE_MS[of], SHARED_MS])
        assert found["fitted_error"][1] < 1e-9 and found["checked_error"][1] < 1e-9


def simulated(rounds, devices, latency, bandwidth):
    """Seconds until the last message has arrived, and for each device the devices whose gradients have reached it.

    rounds: (waits, bytes, [(sender, receiver), ...]). A device sends one message at a time and receives one at a time,
    in the order of the lists. If a round waits, a device passes on what it has received before the round.
    """
    sends, receives, heard = [0.0] * devices, [0.0] * devices, [{i} for i in range(devices)]
    for waits, size, messages in rounds:
        before, known = list(receives), [set(found) for found in heard]
        for sender, receiver in messages:
            start = max(sends[sender], receives[receiver], before[sender] if waits else 0)
            sends[sender] = receives[receiver] = start + latency + size / bandwidth
            heard[receiver] |= known[sender] if waits else {sender}
    return max(receives), heard


def star(k, size):
    return [(False, size, [(i, 0) for i in range(1, k)]), (True, size, [(0, i) for i in range(1, k)])]


def tree(k, size):
    levels, distance = [], 1
    while distance < k:
        levels.append([(i + distance, i) for i in range(0, k - distance, 2 * distance)])
        distance *= 2
    levels += [[(parent, child) for child, parent in level] for level in reversed(levels)]
    return [(True, size, level) for level in levels]


def ring(k, size):
    return [(True, size / k, [(i, (i + 1) % k) for i in range(k)])] * (2 * (k - 1))


def servers(k, size):
    """Each device is a worker and a server: it sends the parts of its gradients, then requests, then sums."""
    turns = [(i, (i + turn) % k) for turn in range(1, k) for i in range(k)]
    answers = [(server, worker) for worker, server in turns]
    return [(False, size / k, turns), (False, 0, turns), (True, size / k, answers)]


ROUNDS = {"star": star, "tree": tree, "ring": ring, "PS": servers}


@pytest.mark.parametrize("way", ROUNDS)
def test_a_formula_is_what_the_messages_take_one_by_one(way):
    assert ROUNDS.keys() == model.CLUSTER.keys()
    for k in (1, 2, 3, 5, 7, 8, 13, 33):
        for size, latency, bandwidth in ((4e6, 1e-4, 1e9), (4e3, 1e-3, 1e9), (5e7, 0.0, 1.25e8), (1e5, 1e-2, 1e12)):
            wanted, heard = simulated(ROUNDS[way](k, size), k, latency, bandwidth)
            assert heard == [set(range(k))] * k
            assert model.allreduce_seconds(way, k, size, latency, bandwidth) == pytest.approx(wanted), (k, size)


needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="make bench-peers installs PyTorch")


def step_in_float64(model):
    """Images, labels, losses; the trained parameters; their gradients, which are sums over the examples."""
    made, rng = harness.replicas("highlevel", model, 1, tune=False), np.random.default_rng(0)
    state = made.state_dict()
    for name, p in state.items():
        if p.ndim == 1 and "running" not in name:
            state[name] = p + 0.1 * rng.standard_normal(p.shape, np.float32)
    made.load_state_dict(state)
    made.net.cast("float64")
    images, labels = datasets.synthetic(4, 1, seed=3)[1:3]
    X, y = nd.array(images / 255, dtype="float64"), nd.array(labels, dtype="float64")
    [losses] = highlevel.forward_backward(made.net, [X], [y])
    params = [p for p in made.net.collect_params().values() if p.grad_req != "null"]
    return [X, y, losses], [p.data() for p in params], [p.grad() for p in params]


PYTORCHS = """
    import sys
    import numpy as np
    import torch
    from bench import torch_peers
    assert "mxnet" not in sys.modules
    model, file = sys.argv[1:]
    X, y, losses, *arrays = np.load(file).values()
    params, gradients = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    net = torch_peers.network(model).double()
    torch_peers.load(net, dict(enumerate(params)))
    found = torch.nn.functional.cross_entropy(net(torch.from_numpy(X)), torch.from_numpy(y).long(), reduction="none")
    found.sum().backward()
    found_gradients = [p.grad.numpy() for p in net.parameters()]
    assert [g.shape for g in gradients] == [g.shape for g in found_gradients]
    whole = np.sqrt(sum((g**2).sum() for g in found_gradients))
    print(float(np.abs(losses - found.detach().numpy()).max()))
    print(max(float(np.linalg.norm(a - b) / whole) for a, b in zip(gradients, found_gradients)))
"""


@needs_torch
@pytest.mark.parametrize("model", ("lenet", "resnet18"))
def test_pytorchs_network_has_our_loss_and_our_gradients(model, tmp_path):
    ours = [array.asnumpy() for arrays in step_in_float64(model) for array in arrays]
    np.savez(tmp_path / "ours.npz", *ours)
    words = [sys.executable, "-c", program(PYTORCHS), model, tmp_path / "ours.npz"]
    done = finished(*words, env=harness.environment())
    assert done.returncode == 0, done.stderr
    assert max(map(float, done.stdout.split())) < 1e-12
