"""`partition`: the bytes agree with counted copies."""

import mxnet as mx
import pytest
from bench import partition as bench
from mxnet import nd
from test_partition import recorded_copies

from gluon_mgpu import partition, scratch


@pytest.mark.parametrize("way", partition.WAYS)
@pytest.mark.parametrize("devices, n", [(1, 8), (2, 8), (2, 7), (3, 5)])
def test_the_bytes_are_those_of_the_copies_that_a_step_makes(way, devices, n):
    ctx, host = [mx.cpu(i) for i in range(devices)], mx.cpu(devices)
    place, train_batch = partition.WAYS[way]
    device_params = place(scratch.init_params(), ctx)
    X, y = nd.ones((n, 1, 28, 28), ctx=host), nd.ones(n, ctx=host)
    with recorded_copies() as copies:
        train_batch(X, y, device_params, ctx, 0.1)
    assert bench.bytes_moved(way, devices, n) == sum(size for source, _, size in copies if source != host)
