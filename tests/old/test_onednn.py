"""`gluon-mgpu run` avoids, or explains, faults of MXNet on CPUs."""

import pytest

CONV1D = """
    import mxnet as mx, numpy as np
    from mxnet import autograd, gluon, nd

    X = nd.random.normal(shape=(8, 16, 40))
    for hybrid in (False, True):
        net = gluon.nn.HybridSequential(prefix="net_")
        convolution = gluon.nn.Conv1D(16, 3, 2, 1, 2, 4, activation="relu", weight_initializer="normal")
        net.add(convolution, gluon.nn.BatchNorm(scale=False), gluon.nn.Conv1D(1, 1, use_bias=False))
        net.initialize(mx.init.One())
        if hybrid:
            net.hybridize()
        with autograd.record():
            Y = net(X)
            (Y ** 3).sum().backward()
        weight = convolution.weight
        two = nd.Convolution(X.expand_dims(2), weight.data().expand_dims(2), convolution.bias.data(), kernel=(1, 3),
                             stride=(1, 2), pad=(0, 1), dilate=(1, 2), num_group=4, num_filter=16)
        expected = nd.relu(two).squeeze(2)
        print(nd.abs(convolution(X) - expected).max().asscalar() < 1e-5, weight.shape, weight.grad().shape, Y.shape)
"""


@pytest.mark.slow
def test_conv1d_before_batch_norm_trains_with_any_number_of_channels(forked):
    run = forked(CONV1D)
    assert run.stdout == "True (16, 4, 3) (16, 4, 3) (8, 1, 19)\n" * 2, run.stderr


def test_an_error_of_mxnet_on_cpus_says_what_to_do(forked):
    run = forked("""
        import mxnet as mx
        net = mx.gluon.nn.Dense(2)
        net.cast("float16")
        net.initialize()
        net(mx.nd.ones((2, 2), dtype="float16")).asnumpy()
    """)
    assert run.returncode == 1 and "float32" in run.stderr.splitlines()[-1]
    run = forked("""
        import mxnet as mx
        data, weight = mx.nd.ones((8, 16, 40)), mx.nd.ones((16, 16, 3))
        for x in (data, weight):
            x.attach_grad()
        with mx.autograd.record():
            y = mx.nd.Convolution(data, weight, kernel=(3,), num_filter=16, no_bias=True)
            z = mx.nd.BatchNorm(y, *[mx.nd.ones(16) for _ in range(4)])
        z.backward()
        mx.nd.waitall()
    """)
    assert run.returncode == 1 and "MXNET_MKLDNN_ENABLED=0" in run.stderr.splitlines()[-1]
