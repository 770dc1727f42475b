"""Two more networks for `highlevel`: ResNet-18, and LeNet with max pooling."""

from __future__ import annotations

from types import ModuleType

from mxnet.gluon import nn
from mxnet.ndarray import NDArray


class Residual(nn.HybridBlock):
    """Two 3x3 convolutions, whose output is added to their input. For an input (n, c, h, w), the output has the shape
    (n, num_channels, h/strides, w/strides).

    use_1x1conv: give the input that shape with a 1x1 convolution, before it is added. Source: He et al.,
    arXiv:1512.03385; names and arguments as in Dive into Deep Learning.
    """

    def __init__(self, num_channels: int, use_1x1conv: bool = False, strides: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2D(num_channels, kernel_size=3, strides=strides, padding=1)
        self.bn1 = nn.BatchNorm()
        self.conv2 = nn.Conv2D(num_channels, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm()
        self.conv3 = nn.Conv2D(num_channels, kernel_size=1, strides=strides) if use_1x1conv else None

    def hybrid_forward(self, F: ModuleType, X: NDArray) -> NDArray:
        Y = F.Activation(self.bn1(self.conv1(X)), act_type="relu")
        Y = self.bn2(self.conv2(Y))
        if self.conv3:
            X = self.conv3(X)
        return F.Activation(Y + X, act_type="relu")


def resnet18() -> nn.HybridSequential:
    """Build ResNet-18, uninitialized: net(X) computes scores (n, 10) from images X (n, 1, 28, 28).

    As in Dive into Deep Learning's variant for small images, the first layer is a 3x3 convolution without pooling.
    """
    net = nn.HybridSequential(prefix="resnet_")
    with net.name_scope():
        net.add(nn.Conv2D(64, kernel_size=3, padding=1), nn.BatchNorm(), nn.Activation("relu"))  # (n, 64, 28, 28)
        net.add(Residual(64), Residual(64))  # (n, 64, 28, 28)
        for num_channels in (128, 256, 512):  # (n, 128, 14, 14), (n, 256, 7, 7), (n, 512, 4, 4)
            net.add(Residual(num_channels, use_1x1conv=True, strides=2), Residual(num_channels))
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(10))  # (n, 512, 1, 1), (n, 512), (n, 10)
    return net


def lenet_max() -> nn.HybridSequential:
    """Build LeNet with max pooling, as in the Gluon notebook, uninitialized: net(X) computes scores (n, 10) from images
    X (n, 1, 28, 28)."""
    net = nn.HybridSequential(prefix="cnn_")
    with net.name_scope():
        net.add(nn.Conv2D(channels=20, kernel_size=3, activation="relu"))  # (n, 20, 26, 26)
        net.add(nn.MaxPool2D(pool_size=2, strides=2))  # (n, 20, 13, 13)
        net.add(nn.Conv2D(channels=50, kernel_size=5, activation="relu"))  # (n, 50, 9, 9)
        net.add(nn.MaxPool2D(pool_size=2, strides=2))  # (n, 50, 4, 4)
        net.add(nn.Flatten(), nn.Dense(128, activation="relu"), nn.Dense(10))
    return net
