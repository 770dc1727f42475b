"""The harness, and the numbers of the smaller benchmarks, compared with NumPy, values computed by hand and bytes."""

import shutil
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
import runs
from bench import allreduce, asynchrony, batch, distributed, harness, roofline, scaling, steps
from bench.harness import Job

from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import datasets

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


@pytest.mark.parametrize(
    "batch_sizes, contexts, cores, ms, efficiency",
    [
        ((256, 256), 4, 2, (40, 30), 40 / 30 / 2),  # only 2 of 4 contexts have a core
        ((256, 256), 2, 4, (40, 25), 40 / 25 / 2),  # only 2 of 4 cores have a context
        ((256, 8 * 256), 8, 2, (40, 160), 1.0),  # 8 * 256 examples in 160 ms instead of 256 in 40: twice the speed
    ],
)
def test_efficiency_is_the_speed_relative_to_one_context_per_core_in_use(batch_sizes, contexts, cores, ms, efficiency):
    one, many = (
        {"contexts": n, "batch_size": size, "step_ms": [first, 10 * first]}
        for n, size, first in zip((1, contexts), batch_sizes, ms)
    )
    assert scaling.efficiencies(one, many, cores) == pytest.approx([efficiency] * 2)


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


SCRIPT = Path(__file__).parents[2] / "scripts/bench.py"


@pytest.mark.parametrize(
    "code, kind",
    [
        ("def work(): print('12 pears')", Error),
        ("def work(): pass", Error),
        ("from gluon_mgpu.runtime.errors import UsageError; raise UsageError(None, None, 'use 2')", UsageError),
    ],
)
def test_a_worker_that_fails_is_one_error_line_that_names_it(code, kind, monkeypatch, tmp_path):
    shutil.copytree(SCRIPT.parent / "bench", tmp_path / "bench")
    monkeypatch.setattr(harness, "SCRIPTS", tmp_path)
    (tmp_path / "bench/failing.py").write_text(code)
    with pytest.raises(Error) as caught:
        harness.start("this subject", Job("failing", {}))
    assert type(caught.value) is kind
    assert "this subject" in str(caught.value) and "\n" not in str(caught.value)


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
