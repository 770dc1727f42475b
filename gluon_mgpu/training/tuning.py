"""Faster networks on CPU contexts, with `--tune`: the same parameters and results, except for rounding.

oneDNN's direct convolutions compute 16 channels at once with AVX-512, and 8 with AVX2. `tuned` pads channels with zeros
to multiples of this number. docs/performance.md has the measurements.
"""

from __future__ import annotations

import functools
from functools import partial
from types import ModuleType

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import HybridBlock, nn
from mxnet.ndarray import NDArray

from gluon_mgpu.compat.pooling import channel_block
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import setting

LAYERS = (
    nn.Conv2D,
    nn.MaxPool2D,
    nn.AvgPool2D,
    nn.GlobalMaxPool2D,
    nn.GlobalAvgPool2D,
    nn.Activation,
    nn.Flatten,
    nn.Dense,
)

_say_once = functools.cache(log.say)


def tuned(net: gluon.Block, block: int | None = None) -> gluon.Block:
    """Create a network that uses the Parameter objects of `net` and computes the same values, except for rounding. It
    is not yet hybridized. If it would not be faster, says so on standard error, and returns `net`.

    net: a network on CPU contexts that has been called at least once, so that the shapes of its parameters are known.
    block: channel counts above this are padded to a multiple of it; default: `channel_block()`.
    """
    block = channel_block() if block is None else block
    if block == 1:
        return _unchanged(net, "the processor lacks AVX2, or DNNL_MAX_CPU_ISA forbids it")
    if type(net) not in (nn.Sequential, nn.HybridSequential) or not all(map(_is_known, net)):
        return _unchanged(net, "the network is not a Sequential of plain convolution, pooling and dense layers")
    fast = nn.HybridSequential(prefix=f"{net.prefix}tuned_")
    channels = padded = 0  # output channels of the most recent convolution, without and with padding
    for layer in net:
        if type(layer) in (nn.Flatten, nn.Dense) and padded > channels:
            fast.add(FirstChannels(channels))
            padded = channels
        if type(layer) is nn.Conv2D:
            inputs, channels = padded or layer.weight.shape[1], layer._channels
            padded = -(-channels // block) * block if channels > block else channels
            fast.add(PaddedConv2D(layer, inputs, padded) if (padded, inputs) != layer.weight.shape[:2] else layer)
        else:
            fast.add(layer)
    if padded > channels:
        fast.add(FirstChannels(channels))
    return fast


def _unchanged(net: gluon.Block, why: str) -> gluon.Block:
    _say_once(f"{setting('tune', True)} changes nothing: {why}")
    return net


def _is_known(layer: gluon.Block) -> bool:
    if type(layer) is not nn.Conv2D:
        return type(layer) in LAYERS
    kwargs = layer._kwargs
    return kwargs["num_group"] == 1 and kwargs["layout"] == "NCHW" and np.dtype(layer.weight.dtype) == np.float32


class PaddedConv2D(HybridBlock):
    """A convolution with the parameters of `layer`. The weights are padded with zeros to `inputs` input channels and
    `outputs` output channels."""

    def __init__(self, layer: nn.Conv2D, inputs: int, outputs: int) -> None:
        super().__init__(prefix=layer.prefix, params=layer.params)
        self.weight = self.params.get("weight")
        self.bias = self.params.get("bias") if layer.bias is not None else None
        self.act, self.kwargs, self.inputs, self.outputs = layer.act, layer._kwargs, inputs, outputs

    def hybrid_forward(self, F: ModuleType, x: NDArray, weight: NDArray, bias: NDArray | None = None) -> NDArray:
        outputs, inputs, *kernel = self.weight.shape
        wide, deep = self.outputs, self.inputs
        zeros = F.zeros if F is mx.sym else partial(F.zeros, ctx=x.context)
        if deep > inputs:
            weight = F.concat(weight, zeros((outputs, deep - inputs, *kernel)), dim=1)
        if wide > outputs:
            weight = F.concat(weight, zeros((wide - outputs, deep, *kernel)), dim=0)
            if bias is not None:
                bias = F.concat(bias, zeros((wide - outputs,)), dim=0)
        arrays = [x, weight] if bias is None else [x, weight, bias]
        y = F.Convolution(*arrays, **{**self.kwargs, "num_filter": wide})
        return self.act(y) if self.act else y


class FirstChannels(HybridBlock):
    """Keeps the first `channels` channels of an array (n, c, h, w), and drops the rest, which are padding."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def hybrid_forward(self, F: ModuleType, x: NDArray) -> NDArray:
        return F.slice_axis(x, axis=1, begin=0, end=self.channels)
