"""Gluon's LeNet on CPU contexts in the shapes that they compute fastest: the same scores and gradients, to rounding.

Channels in blocks of 16: oneDNN's direct convolutions take no others, and LeNet's 20 and 50 go through matrix products
at half the rate. Channels of zeros are added, and left out again where the dense layers begin. Batches in pieces of 64:
what one layer leaves, the next finds in the cache. docs/performance.md has the measurements. Only where the processor
has AVX-512, on which they were made, and MXNet is built without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from gluon_mgpu.runtime import engine

engine.configure()

import mxnet as mx  # noqa: E402
from mxnet import nd  # noqa: E402
from mxnet.gluon import HybridBlock, nn  # noqa: E402
from mxnet.ndarray import NDArray  # noqa: E402

CHANNELS, EXAMPLES = 16, 64


def _avx512() -> bool:
    try:
        with open("/proc/cpuinfo") as file:
            return any(line.startswith("flags") and " avx512f " in line for line in file)
    except OSError:
        return False


USED = _avx512() and not mx.runtime.Features().is_enabled("CUDA")


@contextmanager
def as_written() -> Iterator[None]:
    """Nets that are made, and first computed, within this are computed as they are written."""
    global USED
    before, USED = USED, False
    try:
        yield
    finally:
        USED = before


def rounded(channels: int) -> int:
    """The channels, and those added. An image's one channel has a kernel of its own."""
    return -(-channels // CHANNELS) * CHANNELS if USED and channels > 1 else channels


def parts(X: NDArray) -> int:
    """In how many pieces a batch X (n, ...) should be computed: 1 where this module does nothing."""
    return max(1, -(-X.shape[0] // EXAMPLES)) if USED else 1


def pieces(F: ModuleType, X: NDArray, count: int) -> list[NDArray]:
    """X (n, ...) along its first axis in so many pieces of EXAMPLES, of which the last may be smaller."""
    ends = [*range(EXAMPLES, count * EXAMPLES, EXAMPLES), None]
    return [F.slice_axis(X, axis=0, begin=i * EXAMPLES, end=end) for i, end in enumerate(ends)]


class Conv2D(nn.Conv2D):
    """Gluon's, with its parameters, which gives `rounded` channels. Needs in_channels, a bias, one group, float32."""

    def hybrid_forward(self, F: ModuleType, x: NDArray, weight: NDArray, bias: NDArray) -> NDArray:
        outputs, inputs, kernel = self._channels, self._in_channels, self._kwargs["kernel"]
        wide = rounded(outputs)
        zeros = F.zeros if F is mx.sym else partial(F.zeros, ctx=weight.context)
        if rounded(inputs) > inputs:
            weight = F.concat(weight, zeros((outputs, rounded(inputs) - inputs, *kernel)), dim=1)
        if wide > outputs:
            weight = F.concat(weight, zeros((wide - outputs, rounded(inputs), *kernel)), dim=0)
            bias = F.concat(bias, zeros((wide - outputs,)), dim=0)
        y = F.Convolution(x, weight, bias, **{**self._kwargs, "num_filter": wide})
        return self.act(y) if self.act else y


class First(HybridBlock):
    """The first channels of (n, more channels, h, w)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def hybrid_forward(self, F: ModuleType, x: NDArray) -> NDArray:
        added = rounded(self.channels) > self.channels
        return F.slice_axis(x, axis=1, begin=0, end=self.channels) if added else x


class InPieces(nn.HybridSequential):
    """Gluon's, which, hybridized, takes a batch in pieces within one graph. No layer may look at other examples."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.graphs: dict[int, Callable[[NDArray], NDArray]] = {}  # by number of pieces

    def forward(self, x: NDArray) -> NDArray:
        count = parts(x) if self._active and isinstance(x, nd.NDArray) else 1
        if count == 1:
            return super().forward(x)
        if count not in self.graphs:
            # A block here would look to Gluon like a forgotten child.
            self.graphs[count] = _Pieces(self, count, self._flags).__call__
        return self.graphs[count](x)

    def _clear_cached_op(self) -> None:  # as when it is hybridized in another way, or cast
        super()._clear_cached_op()
        self.graphs = {}


class _Pieces(HybridBlock):
    """A net's graph for so many pieces of a batch."""

    def __init__(self, net: HybridBlock, count: int, flags: list[tuple[str, Any]]) -> None:
        super().__init__()
        self.net, self.count = net, count
        self._active, self._flags = True, list(flags)  # hybridize would have the net, its child, forget its graphs

    def hybrid_forward(self, F: ModuleType, x: NDArray) -> NDArray:
        return F.concat(*[self.net(piece) for piece in pieces(F, x, self.count)], dim=0)
