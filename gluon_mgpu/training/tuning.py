"""Faster training on CPU contexts without changes to a network's code: `tune` returns a faster equivalent network.

Channels are padded with zeros to multiples of 16, the numbers that oneDNN's direct convolutions support. Batches are
computed in pieces of 64 examples, so a layer's output is still in the cache when the next layer reads it. Gradients are
summed in the memory that CPU contexts share. docs/performance.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, kvstore, nd
from mxnet.gluon import HybridBlock, nn
from mxnet.ndarray import NDArray

BLOCK = 16  # channels
PIECE = 64  # examples
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


def tune(net: gluon.Block, ctx: list[Context]) -> gluon.Block:
    """Returns a faster network that computes the same values as `net`, up to rounding, with the same Parameter objects.

    net: an initialized network that was called once, so that its shapes are known. Returns `net` itself in a CUDA
    build, on a processor without AVX-512, and for any network other than a Sequential of LAYERS.
    """
    on_cpus = all(c.device_type == "cpu" for c in ctx) and not mx.runtime.Features().is_enabled("CUDA")
    return tuned(net) if on_cpus and _avx512() and tunable(net) else net


def tunable(net: gluon.Block) -> bool:
    """Whether `tuned` can transform a network."""
    return type(net) in (nn.Sequential, nn.HybridSequential) and all(
        type(layer) in LAYERS and (type(layer) is not nn.Conv2D or _is_plain(layer)) for layer in net
    )


def _is_plain(layer: nn.Conv2D) -> bool:
    kwargs = layer._kwargs
    return kwargs["num_group"] == 1 and kwargs["layout"] == "NCHW" and np.dtype(layer.weight.dtype) == np.float32


def tuned(net: nn.HybridSequential) -> InPieces:
    """Transform a network, as `tune` describes."""
    fast = InPieces(prefix=f"{net.prefix}tuned_")
    channels = padded = 0  # numbers of output channels of the last convolution so far, without and with padding
    for layer in net:
        if type(layer) in (nn.Flatten, nn.Dense) and padded > channels:
            fast.add(FirstChannels(channels))
            padded = channels
        if type(layer) is nn.Conv2D:
            fast.add(PaddedConv2D(layer, padded or layer.weight.shape[1]))
            channels = layer._channels
            padded = padded_channels(channels)
        else:
            fast.add(layer)
    if padded > channels:
        fast.add(FirstChannels(channels))
    fast.hybridize(static_alloc=True, static_shape=True)
    return fast


def padded_channels(channels: int) -> int:
    """The number of channels after padding."""
    return -(-channels // BLOCK) * BLOCK


class PaddedConv2D(HybridBlock):
    """A convolution with the parameters of `layer`. The weights are padded with zeros to `inputs` input channels, which
    include padding, and to a padded number of output channels."""

    def __init__(self, layer: nn.Conv2D, inputs: int) -> None:
        super().__init__(prefix=layer.prefix, params=layer.params)
        self.weight = self.params.get("weight")
        self.bias = self.params.get("bias") if layer.bias is not None else None
        self.act, self.kwargs, self.inputs = layer.act, layer._kwargs, inputs

    def hybrid_forward(self, F: ModuleType, x: NDArray, weight: NDArray, bias: NDArray | None = None) -> NDArray:
        outputs, inputs, *kernel = self.weight.shape
        wide, deep = padded_channels(outputs), self.inputs
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


class InPieces(nn.HybridSequential):
    """A HybridSequential that computes a batch in pieces of PIECE examples, within one graph.

    Every layer must treat each example independently of the rest of the batch.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.graphs: dict[int, Callable[[NDArray], NDArray]] = {}  # {number of pieces: graph}

    def forward(self, x: NDArray) -> NDArray:
        count = -(-x.shape[0] // PIECE) if self._active and isinstance(x, nd.NDArray) else 1
        if count <= 1:
            return super().forward(x)
        if count not in self.graphs:
            self.graphs[count] = _Pieces(self, count).__call__  # a block here would look like an unregistered child
        return self.graphs[count](x)


class _Pieces(HybridBlock):
    """The graph of a network for a batch in `count` pieces."""

    def __init__(self, net: InPieces, count: int) -> None:
        super().__init__()
        self.net, self.count = net, count
        self._active, self._flags = True, list(net._flags)  # hybridize() would also reset net, a child block

    def hybrid_forward(self, F: ModuleType, x: NDArray) -> NDArray:
        ends = [*range(PIECE, self.count * PIECE, PIECE), None]  # the last piece may be smaller
        pieces = [F.slice_axis(x, axis=0, begin=i * PIECE, end=end) for i, end in enumerate(ends)]
        return F.concat(*[self.net(piece) for piece in pieces], dim=0)


def kvstore_for(ctx: list[Context]) -> str | SharedMemoryStore:
    """The fastest store for gluon.Trainer: `SharedMemoryStore` on several CPU contexts, else MXNet's "device" store."""
    on_cpus = all(c.device_type == "cpu" for c in ctx)
    return SharedMemoryStore() if len(ctx) > 1 and on_cpus else "device"


class SharedMemoryStore(kvstore.KVStoreBase):
    """Sums gradients on CPU contexts, where each context can read the arrays of all contexts.

    On k contexts, this moves (3k - 1) times the size of an array, whereas MXNet's KVStore moves (5k + 1) times that
    size. The contexts share the work: each context sums some of the arrays.
    """

    type, rank, num_workers = "shared_memory", 0, 1

    def broadcast(self, key: int, value: NDArray, out: list[NDArray], priority: int = 0) -> None:
        for x in out:
            if x is not value:
                value.copyto(x)

    def pushpull(self, key: int, value: list[NDArray], out: list[NDArray] | None = None, priority: int = 0) -> None:
        first = key % len(value)
        total, *others = value[first:] + value[:first]
        nd.add_n(total, *others, out=total)
        for x in others:
            total.copyto(x)

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False  # it runs no optimizer


def _avx512() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return any(line.startswith("flags") and "avx512f" in line.split() for line in file)
    except OSError:
        return False
