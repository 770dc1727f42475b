"""Splits batches: into shards for devices or workers, and into parts for gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxnet import Context
    from mxnet.ndarray import NDArray


def shard_sizes(examples: int, parts: int, shares: Sequence[float] | None = None) -> list[int]:
    """Divide the examples of a batch among `parts` devices. Returns one size per device; they sum to `examples`.

    shares: the devices' relative shard sizes; None: sizes as equal as possible, larger shards first. Each device gets
    at least one example; if there are fewer examples than devices, the last devices get none.
    """
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


def split_batch(X: NDArray, y: NDArray, parts: int) -> Iterator[tuple[NDArray, NDArray]]:
    """Split a batch in host memory into up to `parts` parts of nearly equal size. Yields (X, y) for each part."""
    start = 0
    for size in shard_sizes(X.shape[0], min(parts, X.shape[0])):
        yield X[start : start + size], y[start : start + size]
        start += size


def split_by_shares(data: NDArray, ctx: list[Context], shares: tuple[float, ...]) -> list[NDArray]:
    """Split a batch into one shard per device, in proportion to shares. Empty shards are omitted."""
    shards, start = [], 0
    for size, c in zip(shard_sizes(data.shape[0], len(ctx), shares), ctx):
        if size:
            shards.append(data[start : start + size].as_in_context(c))
        start += size
    return shards
