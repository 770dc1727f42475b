"""MXNet 2 with the names of 1.9.1 that the lessons use: `make test-mxnet2`."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon, nd

pytestmark = pytest.mark.skipif(mx.__version__ < "2", reason="needs MXNet 2")


class Scaled(gluon.HybridBlock):
    """A block as it was written for MXNet 1.x."""

    def __init__(self, **options):
        super().__init__(**options)
        with self.name_scope():
            self.dense = gluon.nn.Dense(2, in_units=3)

    def hybrid_forward(self, F, x):
        return F.relu(self.dense(x)) * 2


@pytest.mark.parametrize("hybridize", [False, True])
def test_an_old_block_takes_and_returns_arrays_of_nd_and_has_gradients(hybridize):
    net = Scaled(prefix="scaled_")
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    net.dense.weight.set_data(nd.array([[1, 2, 3], [-1, -2, -3]]))
    net.hybridize(hybridize)
    for c in (mx.cpu(0), mx.cpu(1)):
        x = nd.ones((4, 3), ctx=c)
        with autograd.record():
            y = net(x)
        y.backward()
        assert type(y) is nd.NDArray and y.context == c
        np.testing.assert_equal(y.asnumpy(), [[12, 0]] * 4)
        np.testing.assert_equal(net.dense.weight.grad(c).asnumpy(), [[8] * 3, [0] * 3])


def test_a_parameter_is_written_through_its_arrays():
    dense = gluon.nn.Dense(1, in_units=2)
    dense.initialize()
    dense.weight.data()[:] = 7
    assert dense.weight.data().asnumpy().tolist() == [[7, 7]]
