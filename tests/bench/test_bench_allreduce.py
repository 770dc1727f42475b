"""Every way to sum gives the same sum as NumPy, on every context."""

import json

import mxnet as mx
import numpy as np
import pytest
from bench import allreduce, harness

SHAPES = [(20, 1, 3, 3), (7,), (1,), (3, 5), (1001,), (40, 333)]
EPSILON = np.finfo(np.float32).eps


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("shapes", [SHAPES, [(10007,)]], ids=["many", "flat"])
def test_every_way_leaves_numpys_sum_on_every_context(k, shapes):
    rng = np.random.default_rng(k)
    values = [rng.normal(size=(k, *shape)).astype(np.float32) for shape in shapes]
    for way in allreduce.WAYS:
        arrays = [[mx.nd.array(x, mx.cpu(i)) for i, x in enumerate(data)] for data in values]
        sum_all = allreduce.ways(arrays)[way]
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


def test_a_measurement_and_its_table_have_every_way_for_each_network():
    result = allreduce.run(contexts=(3,), rounds=2)
    assert json.loads(json.dumps(result)) == result
    measured = result["workers"]["3 contexts"]
    assert list(measured) == ["LeNet", "LeNet, flat", "ResNet-18", "ResNet-18, flat"]
    for way, row in zip(allreduce.WAYS, allreduce.table(result).splitlines()[-len(allreduce.WAYS) :]):
        times = [ways[way] for ways in measured.values()]
        assert all(len(ms) == 2 and min(ms) > 0 for ms in times)
        assert row.split() == " ".join([way, *map(harness.spread, times)]).split()
