"""Every way of summing leaves NumPy's sum everywhere, and moves the bytes that the table says."""

import io
import json
import subprocess
import sys
import textwrap
from math import prod

import mxnet as mx
import numpy as np
import pytest
from bench import allreduce, harness

from gluon_mgpu import highlevel
from gluon_mgpu.runtime.errors import Error

SHAPES = [(20, 1, 3, 3), (7,), (1,), (3, 5), (1001,), (40, 333)]  # no number of contexts above 1 divides all
EPSILON = np.finfo(np.float32).eps


def on_contexts(values):
    """values: for each parameter, a NumPy array (contexts, *shape); returns lists of NDArrays, one per context."""
    return [[mx.nd.array(x, mx.cpu(i)) for i, x in enumerate(data)] for data in values]


def each_way(values):
    """(way, arrays, the function that sums them), with new arrays for each way."""
    for way in allreduce.WAYS:
        arrays = on_contexts(values)
        yield way, arrays, allreduce.ways(arrays)[way]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("shapes", [SHAPES, [(10007,)]], ids=["many", "flat"])
def test_every_way_leaves_numpys_sum_on_every_context(k, shapes):
    rng = np.random.default_rng(k)
    values = [rng.normal(size=(k, *shape)).astype(np.float32) for shape in shapes]
    for way, arrays, sum_all in each_way(values):
        identities = [[id(x) for x in data] for data in arrays]
        sum_all()
        assert [[id(x) for x in data] for data in arrays] == identities, way
        for data, value in zip(arrays, values):
            exact, size = value.astype(np.float64).sum(0), np.abs(value).sum(0)
            for i, x in enumerate(data):
                assert (x.context, x.shape) == (mx.cpu(i), value.shape[1:]), way
                assert (np.abs(x.asnumpy() - exact) <= k * EPSILON * size).all(), way
                assert (x.asnumpy() == data[0].asnumpy()).all(), f"{way}: {x.context} differs in rounding"


@pytest.mark.parametrize("k", [2, 3])
def test_every_way_sums_integers_exactly_again_and_again(k):
    rng = np.random.default_rng(0)
    values = [rng.integers(-1000, 1000, (k, *shape)).astype(np.float32) for shape in SHAPES]
    for way, arrays, sum_all in each_way(values):
        for _ in range(3):
            sum_all()
        for data, value in zip(arrays, values):
            for x in data:
                assert (x.asnumpy() == value.astype(np.int64).sum(0) * k * k).all(), way


@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_bytes_of_our_own_ways_are_those_of_the_operators_that_they_call(k, monkeypatch):
    counted = []
    copyto, iadd, add_n = mx.nd.NDArray.copyto, mx.nd.NDArray.__iadd__, mx.nd.add_n

    def counting_copyto(self, other):
        counted.append(2 * self.size)
        return copyto(self, other)

    def counting_iadd(self, other):
        counted.append(3 * self.size)
        return iadd(self, other)

    def counting_add_n(*arrays, **out):
        total = add_n(*arrays, **out)
        counted.append(sum(x.size for x in arrays) + total.size)
        return total

    functions = allreduce.ways(on_contexts([np.ones((k, *shape)) for shape in SHAPES]))
    monkeypatch.setattr(mx.nd.NDArray, "copyto", counting_copyto)
    monkeypatch.setattr(mx.nd.NDArray, "__iadd__", counting_iadd)
    monkeypatch.setattr(mx.nd, "add_n", counting_add_n)
    for way in (way for way in functions if not way.startswith("KVStore")):
        counted.clear()
        functions[way]()
        assert sum(counted) == allreduce.moved(way, k) * sum(map(prod, SHAPES)), way


def test_the_bytes_of_the_stores_are_those_of_the_operators_in_the_engines_profile(tmp_path):
    code = """
        import json, sys
        import gluon_mgpu; gluon_mgpu.configure(3)
        import mxnet as mx
        from bench import allreduce
        for k in 2, 3:  # on c cores the profiler supports cpu(0) to cpu(c + 1)
            for way in "KVStore local", "KVStore device":
                arrays = [[mx.nd.ones((10,), mx.cpu(i)) for i in range(k)] for _ in range(4)]
                sum_all = allreduce.ways(arrays)[way]
                sum_all(), mx.nd.waitall()
                mx.profiler.set_config(profile_imperative=True, aggregate_stats=True, filename=sys.argv[1])
                mx.profiler.set_state("run"); sum_all(); mx.nd.waitall(); mx.profiler.set_state("stop")
                operators = json.loads(mx.profiler.dumps(reset=True, format="json"))["Time"]["operator"]
                counts = {name: spent["Count"] for name, spent in operators.items()}
                print(json.dumps([k, way, counts, allreduce.moved(way, k)]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "t.json")]
    done = subprocess.run(command, env=harness.environment(), capture_output=True, text=True, timeout=120)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4, done.stderr
    for k, way, counts, moved in found:
        bytes_of = {"CopyCPU2CPU": 2, "KVStoreReduce": k + 1, "ElementwiseSum": k + 1}
        assert sum(bytes_of[name] * count for name, count in counts.items()) == 4 * moved, (way, counts)


def test_the_stores_are_called_as_gluons_trainer_calls_them(monkeypatch):
    asked = []

    def pushpull(store, key, value, out=None, priority=0):
        asked.append((key, [(x.shape, x.context) for x in value], out, priority))

    ctx = [mx.cpu(0), mx.cpu(1)]
    replicas = highlevel.Replicas(ctx, tune=False)
    replicas.train_batch(mx.nd.zeros((4, 1, 28, 28)), mx.nd.zeros(4), 0.1)
    arrays = [[mx.nd.zeros(g.shape, c) for c in ctx] for g in replicas.gradients().values()]
    sum_all = allreduce.ways(arrays)["KVStore device"]
    monkeypatch.setattr(mx.kvstore.KVStore, "pushpull", pushpull)
    replicas.trainer.allreduce_grads()
    by_trainer = asked[:]
    asked.clear()
    sum_all()
    assert asked == by_trainer and len(asked) == 8


def test_a_measurement_has_every_way_at_every_point():
    result = allreduce.run(contexts=(1, 3), rounds=2, models=("lenet",))
    assert json.loads(json.dumps(result)) == result
    lenet = 4 * sum(p.size for p in highlevel.Replicas([mx.cpu()]).gradients().values())
    for worker, k in zip(result["workers"], (1, 3)):
        assert worker["contexts"] == k
        found = [(p["name"], p["model"], p["arrays"], p["bytes"]) for p in worker["points"]]
        networks = [("LeNet", "lenet", 8, lenet), ("LeNet, flat", "lenet", 1, lenet)]
        assert found == networks
        for p in worker["points"]:
            assert p["ms"].keys() == allreduce.WAYS.keys()
            assert all(len(ms) == 2 and min(ms) > 0 for ms in p["ms"].values())
    picture = io.BytesIO()
    allreduce.draw(result, picture)
    assert picture.getvalue().startswith(b"\x89PNG")


def test_the_table_gives_the_rates_computed_by_hand():
    ms = {way: [8.0, 8.0, 8.0] for way in allreduce.WAYS}
    ms["star"] = [2.0, 1.0, 4.0]
    points = [{"name": "1 MiB", "model": None, "arrays": 1, "bytes": 1 << 20, "ms": ms}]
    lines = allreduce.table({"rounds": 3, "workers": [{"contexts": 2, "points": points}]}).splitlines()
    stars = [line.split()[1:] for line in lines if line.startswith("star")]
    assert ["2.00", "(1.00-4.00)"] in stars and ["3.67"] in stars  # 7 MiB in the median's 2 ms


def test_a_worker_that_fails_is_an_error_of_one_line_with_its_reason():
    with pytest.raises(Error, match="2 contexts.*vgg") as caught:
        allreduce.run(contexts=(2,), rounds=1, models=("vgg",))
    assert "\n" not in str(caught.value)
