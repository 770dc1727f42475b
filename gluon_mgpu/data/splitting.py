"""Splits batches into shards for devices or workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from gluon_mgpu.support.errors import UsageError, check_whole

if TYPE_CHECKING:
    from mxnet import Context
    from mxnet.ndarray import NDArray


def shard_sizes(examples: int, parts: int, shares: Sequence[float] | None = None) -> list[int]:
    """Divide the examples of a batch among `parts` devices. Returns one size per device; they sum to `examples`.

    shares: the devices' relative shard sizes; None: sizes as equal as possible, larger shards first. Each device gets
    at least one example; if there are fewer examples than devices, the last devices get none. Raises UsageError for
    numbers that cannot be used.
    """
    check_whole("examples", examples, 0)
    check_whole("parts", parts, 1)
    if shares and (len(shares) != parts or not all(0 < share < math.inf for share in shares)):
        raise UsageError("shares", shares, f"must be {parts} positive numbers, one per device")
    if examples <= parts:
        return [int(i < examples) for i in range(parts)]
    shares = shares or (1,) * parts
    exact = [examples * share / sum(shares) for share in shares]
    sizes = [max(1, int(e)) for e in exact]
    while sum(sizes) != examples:  # largest remainder method
        change = 1 if sum(sizes) < examples else -1
        chosen = max((i for i in range(parts) if sizes[i] + change >= 1), key=lambda i: change * (exact[i] - sizes[i]))
        sizes[chosen] += change
    return sizes


def split(data: NDArray, ctx: list[Context], shares: Sequence[float] | None = None) -> list[NDArray]:
    """Split a batch into one shard per device, in order. Empty shards are omitted. shares: see `shard_sizes`."""
    sizes = shard_sizes(data.shape[0], len(ctx), shares)
    return [data[end - size : end].as_in_context(c) for c, size, end in zip(ctx, sizes, accumulate(sizes)) if size]
