"""Every way to sum gives the same sum as NumPy, on every context."""

import json

import mxnet as mx
import numpy as np
import pytest
from bench import allreduce

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


def test_a_measurement_has_every_way_for_each_network():
    result = allreduce.run(contexts=(3,), rounds=2)
    assert json.loads(json.dumps(result)) == result
    assert list(result["workers"]["3 contexts"]) == ["LeNet", "LeNet, flat", "ResNet-18", "ResNet-18, flat"]
    for ways in result["workers"]["3 contexts"].values():
        assert ways.keys() == allreduce.WAYS.keys()
        assert all(len(ms) == 2 and min(ms) > 0 for ms in ways.values())


def test_the_table_has_medians():
    gradients = {"LeNet": {way: [2.0, 1.0, 4.0] for way in allreduce.WAYS}}
    lines = allreduce.table({"rounds": 3, "workers": {"2 contexts": gradients}}).splitlines()
    assert ["star", "2.00", "(1.00-4.00)"] in [line.split() for line in lines]
