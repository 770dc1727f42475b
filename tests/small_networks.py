"""Networks for tests, smaller than LeNet: softmax regression, and one with batch normalization."""

import mxnet as mx
from mxnet.gluon import nn

from gluon_mgpu import networks


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


networks.register("normalized", normalized, mx.init.Xavier())
