"""Faster training on CPU contexts, with `--tune`: `TunedModel` has a faster trainer, loss and network than GluonModel.

On processors with AVX-512, channels are padded with zeros to multiples of 16, because oneDNN's direct convolutions
require such multiples, and a shard is computed in pieces of 64 examples, so that a layer's output is still in the cache
when the next layer reads it. On other processors, the network runs as written. `Trainer` speeds up the gradient sums
and the updates everywhere. docs/performance.md has the measurements.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, nd
from mxnet.gluon import HybridBlock, nn
from mxnet.ndarray import NDArray

from gluon_mgpu import highlevel
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import GluonModel

BLOCK, PIECE = 16, 64  # channels and examples, on processors with AVX-512
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


def has_avx512() -> bool:
    """Whether oneDNN uses AVX-512: the processor supports it, and DNNL_MAX_CPU_ISA does not forbid it."""
    allowed = os.environ.get("DNNL_MAX_CPU_ISA", "ALL").upper()
    flags = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return bool(flags and "avx512bw" in flags[1].split()) and allowed.startswith(("AVX512_CORE", "ALL", "DEFAULT"))


def tunable(net: gluon.Block, ctx: list[Context]) -> bool:
    """Whether `tuned` can transform a network for these devices: a Sequential of LAYERS, on CPU contexts, in a build of
    MXNet without CUDA."""
    return (
        all(c.device_type == "cpu" for c in ctx)
        and not mx.runtime.Features().is_enabled("CUDA")
        and type(net) in (nn.Sequential, nn.HybridSequential)
        and all(type(layer) in LAYERS and (type(layer) is not nn.Conv2D or _is_plain(layer)) for layer in net)
    )


def _is_plain(layer: nn.Conv2D) -> bool:
    kwargs = layer._kwargs
    return kwargs["num_group"] == 1 and kwargs["layout"] == "NCHW" and np.dtype(layer.weight.dtype) == np.float32


def tuned(net: gluon.Block, block: int = BLOCK, piece: int = PIECE) -> InPieces:
    """Create a network that uses the Parameter objects of `net` and computes the same values, except for rounding.

    net: a `tunable` network that has been called at least once, so that the shapes of its parameters are known. block:
    channel counts above this are padded to a multiple of it; 1: no padding. piece: number of examples computed at once;
    0: all.
    """
    fast = InPieces(piece, prefix=f"{net.prefix}tuned_")
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
    fast.hybridize(static_alloc=True, static_shape=True)
    return fast


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


class InPieces(nn.HybridSequential):
    """A HybridSequential that computes a batch in pieces of `piece` examples, within one graph.

    If piece is 0, the whole batch is computed at once. Every layer must treat each example independently of the rest of
    the batch.
    """

    def __init__(self, piece: int, **options: Any) -> None:
        super().__init__(**options)
        self.piece = piece
        self.graphs: dict[int, Callable[[NDArray], NDArray]] = {}  # {number of pieces: graph}

    def forward(self, x: NDArray) -> NDArray:
        count = -(-x.shape[0] // self.piece) if self.piece and self._active and isinstance(x, nd.NDArray) else 1
        if count <= 1:
            return super().forward(x)
        if count not in self.graphs:
            self.graphs[count] = _Pieces(self, count).__call__  # Gluon would warn about a block in a dict
        return self.graphs[count](x)


class _Pieces(HybridBlock):
    """The graph of a network for a batch that is split into `count` pieces."""

    def __init__(self, net: InPieces, count: int) -> None:
        super().__init__()
        self.net, self.count = net, count
        self._active, self._flags = True, list(net._flags)  # hybridize() would also reset net, a child block

    def hybrid_forward(self, F: ModuleType, x: NDArray) -> NDArray:
        piece = self.net.piece
        ends = [*range(piece, self.count * piece, piece), None]  # the last piece may be smaller
        pieces = [F.slice_axis(x, axis=0, begin=i * piece, end=end) for i, end in enumerate(ends)]
        return F.concat(*[self.net(piece) for piece in pieces], dim=0)


class SGD(mx.optimizer.SGD):
    """MXNet's SGD for float32 arrays, which are updated one at a time. On CPUs, `multi_sgd_update`, which MXNet's own
    class uses for dense arrays, takes twice as long."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.aggregate_num = 0

    def update_multi_precision(self, index: int, weight: NDArray, grad: NDArray, state: NDArray | None) -> None:
        self._update_count(index)
        rule = {"lr": self._get_lr(index), "wd": self._get_wd(index), "rescale_grad": self.rescale_grad}
        if state is None:
            nd.sgd_update(weight, grad, out=weight, **rule)
        else:
            nd.sgd_mom_update(weight, grad, state, out=weight, momentum=self.momentum, **rule)


class Trainer(gluon.Trainer):
    """A gluon.Trainer for CPU contexts, where each context can read the arrays of all contexts.

    The contexts share the work: each sums the gradients of some arrays, updates these arrays, and copies them to the
    other contexts, as in ZeRO (Rajbhandari et al., 2019, stage 1). With momentum, every context updates its own arrays,
    because each has its own velocities. To sum an array over k contexts, this moves (3k - 1) times the array's size
    through memory, and MXNet's KVStore (5k + 1) times. rule: learning_rate, momentum and wd.
    """

    def __init__(self, params: list[gluon.Parameter], rule: dict[str, float]) -> None:
        super().__init__(params, SGD(**rule), kvstore=None)
        loads = [0] * len(params[0].list_ctx())  # total size of the arrays that each context sums
        self.owners: list[int] = []  # for each array, the index of the context that sums it
        for p in params:
            self.owners.append(loads.index(min(loads)))
            loads[self.owners[-1]] += math.prod(p.shape)

    def _allreduce_grads(self) -> None:
        for p, owner in zip(self._params, self.owners):
            _reduce(p.list_grad(), owner)
            _broadcast(p.list_grad(), owner)

    def step(self, batch_size: int, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients, and update the arrays. Without momentum, only the context that updated an array then holds
        the array's summed gradient. Raises UserWarning if the backward pass has not computed a gradient, as
        gluon.Trainer does."""
        fresh = all(array._fresh_grad for p in self._params for array in p.list_data())
        if self._optimizer.momentum or ignore_stale_grad or not fresh:
            super().step(batch_size, ignore_stale_grad)  # also raises the error for stale gradients
            return
        self._optimizer.rescale_grad = self._scale / batch_size
        for key, (p, owner) in enumerate(zip(self._params, self.owners)):
            grads, arrays = p.list_grad(), p.list_data()
            _reduce(grads, owner)
            self._updaters[owner](key, grads[owner], arrays[owner])
            _broadcast(arrays, owner)
            for array in arrays:
                array._fresh_grad = False


def _reduce(arrays: list[NDArray], owner: int) -> None:
    """Sum arrays of the same shape, one per context, in place on the context with index `owner`."""
    total, *others = arrays[owner:] + arrays[:owner]
    if others:
        nd.add_n(total, *others, out=total)


def _broadcast(arrays: list[NDArray], owner: int) -> None:
    for array in arrays:
        if array is not arrays[owner]:
            arrays[owner].copyto(array)


class TunedModel(GluonModel):
    """A GluonModel with a faster trainer and loss and, if possible, network. written: the network as it is written."""

    def __init__(self, lesson: ModuleType, ctx: list[Context], config: Config, image_shape: Sequence[int]) -> None:
        if ctx[0].device_type != "cpu" or mx.__version__ >= "2":
            raise UsageError("tune", True, f"needs CPU contexts and MXNet 1.9.1, not {ctx[0]} and {mx.__version__}")
        if config.hybridize and lesson is highlevel:  # all models share its loss, so this one gets a copy
            assert highlevel.__spec__ and highlevel.__spec__.loader
            lesson = importlib.util.module_from_spec(highlevel.__spec__)
            highlevel.__spec__.loader.exec_module(lesson)
            lesson.loss.hybridize(static_alloc=True, static_shape=True)
        super().__init__(lesson, ctx, config, image_shape)
        self.written = self.net
        if config.hybridize and has_avx512() and tunable(self.net, ctx):
            self.net = tuned(self.net)

    def _create_trainer(self, params: list[gluon.Parameter], rule: dict[str, float]) -> gluon.Trainer:
        return Trainer(params, rule)

    def export(self, prefix: str) -> None:
        self.net = self.written
        super().export(prefix)
