"""ResNet-18, and LeNet with max pooling, in Gluon."""

from __future__ import annotations

from types import ModuleType

from mxnet.gluon import nn
from mxnet.ndarray import NDArray


class Residual(nn.HybridBlock):
    """Two 3x3 convolutions, whose output is added to their input. For an input (n, c, h, w), the output has the shape
    (n, channels, h/stride, w/stride).

    If the shape changes, a 1x1 convolution gives the input the new shape. Source: He et al., arXiv:1512.03385.
    """

    def __init__(self, channels: int, stride: int = 1, change_shape: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2D(channels, kernel_size=3, strides=stride, padding=1)
        self.bn1 = nn.BatchNorm()
        self.conv2 = nn.Conv2D(channels, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm()
        self.conv3 = nn.Conv2D(channels, kernel_size=1, strides=stride) if change_shape else None

    def hybrid_forward(self, F: ModuleType, X: NDArray) -> NDArray:
        Y = F.Activation(self.bn1(self.conv1(X)), act_type="relu")
        Y = self.bn2(self.conv2(Y))
        return F.Activation(Y + (self.conv3(X) if self.conv3 else X), act_type="relu")


def resnet18() -> nn.HybridSequential:
    """Build ResNet-18 for images (n, 1, 28, 28). As in Dive into Deep Learning's variant for small images, the first
    layer is a 3x3 convolution without pooling."""
    net = nn.HybridSequential(prefix="resnet_")
    with net.name_scope():
        net.add(nn.Conv2D(64, kernel_size=3, padding=1), nn.BatchNorm(), nn.Activation("relu"))  # (n, 64, 28, 28)
        for channels in (64, 128, 256, 512):  # the last stage returns (n, 512, 4, 4)
            smaller = channels > 64
            net.add(Residual(channels, 1 + smaller, smaller), Residual(channels))
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(10))
    return net


def lenet_max() -> nn.HybridSequential:
    """Build LeNet with max pooling, as in the Gluon notebook, for images (n, 1, 28, 28)."""
    net = nn.HybridSequential(prefix="cnn_")
    with net.name_scope():
        net.add(nn.Conv2D(channels=20, kernel_size=3, activation="relu"), nn.MaxPool2D(pool_size=2, strides=2))
        net.add(nn.Conv2D(channels=50, kernel_size=5, activation="relu"), nn.MaxPool2D(pool_size=2, strides=2))
        net.add(nn.Flatten(), nn.Dense(128, activation="relu"), nn.Dense(10))
    return net
