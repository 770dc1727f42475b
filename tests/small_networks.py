"""Networks for tests, smaller than LeNet: softmax regression for both lessons, and one with batch normalization."""

import mxnet as mx
from mxnet import nd
from mxnet.gluon import nn

from gluon_mgpu.training import registry


def softmax_regression(X, params):
    return nd.FullyConnected(X, *params, num_hidden=10)


def dense():
    net = nn.HybridSequential()
    net.add(nn.Dense(10))
    return net


def normalized():
    net = nn.HybridSequential(prefix="normalized_")
    with net.name_scope():
        net.add(nn.Conv2D(6, 3, strides=2, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D())
        net.add(nn.Dense(20, use_bias=False), nn.BatchNorm(scale=False), nn.Dense(10))
    return net


registry.register("softmax_regression", dense, mx.init.Zero(), names=("p0", "p1"))
registry.register("normalized", normalized, mx.init.Xavier())
