"""Allreduce on CPU contexts. They share their memory, and MXNet lets an operator of one read the arrays of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gluon_mgpu.runtime import engine

engine.configure()

from mxnet import Context, kvstore, nd  # noqa: E402
from mxnet.ndarray import NDArray  # noqa: E402

if TYPE_CHECKING:
    from gluon_mgpu.distributed.workers import Workers


def serves(ctx: list[Context]) -> bool:
    """Whether all of several contexts are CPU contexts."""
    return len(ctx) > 1 and all(c.device_type == "cpu" for c in ctx)


def allreduce(data: list[NDArray], workers: Workers | None = None, key: int = 0) -> None:
    """Sum arrays of one shape, one a CPU context, in place: one sum of all where they lie, then copies of it.

    It reads and writes 3k - 1 times an array's bytes on k contexts, where copying all to the first one, to be added
    there, takes 7k - 7, and MXNet's KVStore 5k + 1. workers, key: as in `scratch.allreduce`.
    """
    nd.add_n(*data, out=data[0])
    if workers:
        workers.allreduce(data[0], key)
    for x in data[1:]:
        data[0].copyto(x)


class Store(kvstore.KVStoreBase):
    """What gluon.Trainer sums gradients with on CPU contexts, each array on another context than the one before it."""

    type, rank, num_workers = "shared_memory", 0, 1

    def broadcast(self, key: int, value: NDArray, out: list[NDArray], priority: int = 0) -> None:
        for x in out:
            if x is not value:
                value.copyto(x)

    def pushpull(self, key: int, value: list[NDArray], out: list[NDArray] | None = None, priority: int = 0) -> None:
        first = key % len(value)
        allreduce(value[first:] + value[:first])

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False  # it runs no optimizer
