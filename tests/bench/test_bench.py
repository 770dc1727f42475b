"""Tests of the harness and of the benchmarks, compared with NumPy and with values computed by hand.

mxnet is imported here, so torch is not: it runs in separate processes. Tests that need torch are skipped if it is
missing.
"""

import importlib.util
import sys
import time
from collections import Counter

import mxnet as mx
import numpy as np
import pytest
from bench import allreduce, distributed, gpu, harness, partition, scaling, steps, timeline
from bench.harness import TUNED, Job
from forks import forked
from mxnet import nd
from runs import ROOT, program

from gluon_mgpu import highlevel, scratch
from gluon_mgpu import partition as lesson
from gluon_mgpu.data import datasets
from gluon_mgpu.training.model import read_arrays

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


@pytest.mark.parametrize("size, contexts, cores", [(256, 4, 2), (256, 2, 4), (8 * 256, 8, 2)])
def test_efficiency_is_the_speed_relative_to_one_context_per_core_in_use(size, contexts, cores):
    one = {"contexts": 1, "batch_size": 256, "step_ms": [40, 400]}
    many = {"contexts": contexts, "batch_size": size, "step_ms": [30, 300]}
    expected = size / 256 * 40 / 30 / 2  # 2 of 4 contexts have a core, or 2 of 4 cores have a context
    assert scaling.efficiencies(one, many, cores) == pytest.approx([expected] * 2)


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


def test_every_implementation_is_measured_on_the_same_training(mxnet):
    subjects = [steps.Subject("scratch", 1), *(steps.Subject(impl, 2) for impl in ("scratch", "highlevel", TUNED))]
    jobs = [subject._replace(batch_size=32).job(steps=1) for subject in subjects]
    with forked(harness, mxnet):
        one, *two = (harness.start(str(subject), job) for subject, job in zip(subjects, jobs))
    assert [run["loss"] for run in two] == pytest.approx([one["loss"]] * 3, rel=1e-5)
    assert all(run["step_ms"] > 0.1 for run in two)


def test_two_workers_are_measured_on_the_training_of_one_process():
    arguments = {"impl": "scratch", "model": "lenet", "steps": 5}
    one, two = (harness.start(kvstore, distributed.job(kvstore, **arguments)) for kvstore in ("local", "mpi"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6) and two["step_ms"] > 1


def test_a_step_of_data_parallelism_moves_each_gradient_and_each_sum_between_two_devices():
    (place, train_batch), ctx = lesson.WAYS["data parallelism"], [mx.cpu(0), mx.cpu(1)]
    device_params = place(scratch.init_params(), ctx)
    moved = partition.bytes_moved(lambda X, y, lr: train_batch(X, y, device_params, ctx, lr), 7)
    assert moved == 2 * 4 * (200 + 25050 + 102528 + 1290)  # LeNet's layers


def test_a_recording_has_each_operator_of_each_step_on_each_context():
    model = harness.build("scratch", "lenet", 2)
    recorded = timeline.record(model.step, 0.1, 2, 16, steps=3)
    for context in range(2):
        counts = Counter(operator for of, operator, *_ in recorded if of == context)
        expected = {"Convolution": 2, "_backward_Convolution": 2, "FullyConnected": 2, "Pooling": 2, "sgd_update": 8}
        assert {operator: counts[operator] for operator in expected} == {name: 3 * n for name, n in expected.items()}
        assert 0 < sum(timeline.busy(recorded, context).values()) <= 1


def step_in_float64(model):
    """Images, labels, losses; the trained parameters; their gradients, which are sums over the examples."""
    made, rng = harness.build("highlevel", model, 1), np.random.default_rng(0)
    state = read_arrays(made)
    for name, p in state.items():
        if p.ndim == 1 and "running" not in name:
            state[name] = p + 0.1 * rng.standard_normal(p.shape, np.float32)
    made.load(state)
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
    scripts, model, file = sys.argv[1:]
    sys.path.append(scripts)
    from bench import torch_peers
    assert "mxnet" not in sys.modules
    X, y, losses, *arrays = np.load(file).values()
    params, gradients = arrays[: len(arrays) // 2], arrays[len(arrays) // 2 :]
    net = torch_peers.network(model).double()
    torch_peers.load(net, dict(enumerate(params)))
    X, y = torch.from_numpy(X), torch.from_numpy(y).long()
    their_losses = torch.nn.functional.cross_entropy(net(X), y, reduction="none")
    their_losses.sum().backward()
    their_gradients = [p.grad.numpy() for p in net.parameters()]
    assert [g.shape for g in gradients] == [g.shape for g in their_gradients]
    whole = np.sqrt(sum((g**2).sum() for g in their_gradients))
    print(float(np.abs(losses - their_losses.detach().numpy()).max()))
    print(max(float(np.linalg.norm(a - b) / whole) for a, b in zip(gradients, their_gradients)))
"""


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="make torch installs PyTorch")
@pytest.mark.parametrize("model", ("lenet", "resnet18"))
def test_pytorchs_network_has_our_loss_and_our_gradients(model, pytorch, tmp_path):
    ours = [array.asnumpy() for arrays in step_in_float64(model) for array in arrays]
    np.savez(tmp_path / "ours.npz", *ours)
    words = [sys.executable, "-c", program(PYTORCHS), ROOT / "scripts", model, tmp_path / "ours.npz"]
    done = pytorch.run(words)
    assert done.status == 0, done.err
    assert max(map(float, done.out.split())) < 1e-12


def test_the_time_until_a_call_returns_excludes_the_wait():
    times = gpu._times(lambda: None, lambda: time.sleep(0.01), 4)
    assert times["called_ms"] < 5 and times["alone_ms"] >= 10 and 10 / 4 <= times["each_ms"] < times["alone_ms"]


def test_one_device_is_measured_by_batch_size_with_an_installed_engine(monkeypatch):
    monkeypatch.setattr(gpu, "ENGINES", {"mxnet": "MXNet", "no_such_engine": "none"})
    monkeypatch.setattr(harness, "start", lambda name, job: gpu.work(**job.arguments))
    result = gpu.run(["lenet"], [2, 4], "cpu", 1)
    assert [*result["engines"]] == ["MXNet"]
    rows = [line.split("  ")[0] for line in gpu.table(result).splitlines()]
    assert {"LeNet, batch 2", "LeNet, batch 4"} < {*rows}
