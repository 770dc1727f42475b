import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon, nd

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.training import shared_memory
from gluon_mgpu.training.settings import Settings


@pytest.mark.parametrize("k", [2, 3, 5])
def test_every_context_holds_numpys_sum_in_the_array_it_had(k):
    values = np.random.default_rng(k).standard_normal((k, 7, 11)).astype(np.float32)
    data = [nd.array(x, mx.cpu(i)) for i, x in enumerate(values)]
    before = list(data)
    shared_memory.allreduce(data)
    for i, x in enumerate(data):
        assert x is before[i] and x.context == mx.cpu(i)
        np.testing.assert_allclose(x.asnumpy(), values.astype(np.float64).sum(0), rtol=0, atol=1e-6)
        assert (x.asnumpy() == data[0].asnumpy()).all()


@pytest.mark.parametrize("k", [2, 3])
def test_the_store_sums_as_the_lessons_allreduce_does_whatever_the_key(k):
    values = np.random.default_rng(k).integers(-50, 50, (k, 20)).astype(np.float32)
    expected = [nd.array(x, mx.cpu(i)) for i, x in enumerate(values)]
    scratch.allreduce(expected)
    for key in range(4):
        data = [nd.array(x, mx.cpu(i)) for i, x in enumerate(values)]
        shared_memory.Store().pushpull(key, data)
        assert [x.context for x in data] == [mx.cpu(i) for i in range(k)]
        for x, sums in zip(data, expected):
            np.testing.assert_array_equal(x.asnumpy(), sums.asnumpy())


def test_a_trainer_with_the_store_trains_as_with_mxnets():
    X, y = nd.random.uniform(shape=(30, 1, 28, 28)), nd.floor(nd.random.uniform(0, 10, shape=30))
    ctx, found = [mx.cpu(i) for i in range(3)], []
    for kvstore in (shared_memory.Store(), "device"):
        mx.random.seed(1)
        replicas = highlevel.Replicas(ctx, Settings(30))
        replicas.trainer = gluon.Trainer(
            list(replicas.trained.values()), "sgd", {"learning_rate": 0.2}, kvstore=kvstore, update_on_kvstore=False
        )
        for _ in range(3):
            replicas.train_batch(X, y, 0.2)
        found.append([replicas.parameters(device) for device in range(3)])
    for ours, mxnets in zip(*found):
        for name, expected in mxnets.items():
            np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_it_serves_several_cpu_contexts_only():
    assert shared_memory.serves([mx.cpu(0), mx.cpu(1)])
    assert not shared_memory.serves([mx.cpu()])
    assert not shared_memory.serves([mx.gpu(0), mx.gpu(1)])
    assert not shared_memory.serves([mx.cpu(0), mx.gpu(0)])
