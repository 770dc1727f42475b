"""Every way of summing leaves NumPy's sum everywhere, and moves as many bytes as the table says."""

import json
from math import prod

import mxnet as mx
import numpy as np
import pytest
from bench import allreduce

from gluon_mgpu import highlevel

SHAPES = [(20, 1, 3, 3), (7,), (1,), (3, 5), (1001,), (40, 333)]
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
        sum_all()  # again: k times the sum
        assert [[id(x) for x in data] for data in arrays] == identities, way
        for data, value in zip(arrays, values):
            exact, size = k * value.astype(np.float64).sum(0), k * np.abs(value).sum(0)
            for i, x in enumerate(data):
                assert (x.context, x.shape) == (mx.cpu(i), value.shape[1:]), way
                assert (np.abs(x.asnumpy() - exact) <= 2 * k * EPSILON * size).all(), way
                assert (x.asnumpy() == data[0].asnumpy()).all(), f"{way}: {x.context} differs in rounding"


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
    k, events = 2, {"CopyCPU2CPU": 2, "KVStoreReduce": 3, "ElementwiseSum": 3}  # bytes of each, in those of an array
    for way in ("KVStore local", "KVStore device"):
        sum_all = allreduce.ways([[mx.nd.ones((10,), mx.cpu(i)) for i in range(k)] for _ in range(4)])[way]
        sum_all(), mx.nd.waitall()
        mx.profiler.set_config(profile_imperative=True, aggregate_stats=True, filename=str(tmp_path / "profile.json"))
        mx.profiler.dumps(reset=True)  # drops what an earlier test of this process recorded
        mx.profiler.set_state("run"), sum_all(), mx.nd.waitall(), mx.profiler.set_state("stop")
        operators = json.loads(mx.profiler.dumps(reset=True, format="json"))["Time"]["operator"]
        moved = sum(events[name] * spent["Count"] for name, spent in operators.items())
        assert moved == 4 * allreduce.moved(way, k), (way, operators)


def test_a_measurement_has_every_way_at_every_point():
    result = allreduce.run(contexts=(3,), rounds=2, models=("lenet",))
    assert json.loads(json.dumps(result)) == result
    lenet = 4 * sum(p.size for p in highlevel.Replicas([mx.cpu()]).gradients().values())
    [worker] = result["workers"]
    found = [(p["name"], p["arrays"], p["bytes"]) for p in worker["points"]]
    assert worker["contexts"] == 3 and found == [("LeNet", 8, lenet), ("LeNet, flat", 1, lenet)]
    for p in worker["points"]:
        assert p["ms"].keys() == allreduce.WAYS.keys()
        assert all(len(ms) == 2 and min(ms) > 0 for ms in p["ms"].values())


def test_the_table_gives_the_rates_computed_by_hand():
    ms = {way: [8.0, 8.0, 8.0] for way in allreduce.WAYS}
    ms["star"] = [2.0, 1.0, 4.0]
    points = [{"name": "1 MiB", "arrays": 1, "bytes": 1 << 20, "ms": ms}]
    lines = allreduce.table({"rounds": 3, "workers": [{"contexts": 2, "points": points}]}).splitlines()
    stars = [line.split()[1:] for line in lines if line.startswith("star")]
    assert ["2.00", "(1.00-4.00)"] in stars and ["3.67"] in stars  # 7 MiB in the median's 2 ms
