"""A training step with what the notebooks' step lacks: shares, and several workers.

The step consists of the lesson's own functions, which a model provides. Without shares, and in a single process, a step
is the lesson's `train_batch` itself.
"""

from __future__ import annotations

from collections.abc import Callable

from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu.data.splitting import split
from gluon_mgpu.training.models import Model
from gluon_mgpu.training.workers import Group

Step = Callable[[NDArray, NDArray, float], list[NDArray]]  # (X, y, lr) -> the losses of each shard


def assemble(model: Model, group: Group) -> Step:
    """Put a step together from a model's functions. With several workers, X and y are this worker's part of the
    batch."""
    shares = model.config.shares

    def shards(data: NDArray) -> list[NDArray]:
        return split(data, model.ctx, shares) if shares else model.split_and_load(data)

    def step(X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        batch_size = int(group.total(X.shape[0]))
        losses = model.forward_backward(shards(X), shards(y))
        model.allreduce()
        if group.size > 1:
            _sum_over_workers([model.grads(i) for i in range(len(model.ctx))], group)
        model.update(lr, batch_size)
        model.average_running_stats(losses, X.shape[0], group, X.shape[0] / batch_size)
        return losses

    return step


def _sum_over_workers(grads: list[dict[str, NDArray]], group: Group) -> None:
    """Sum the gradients over all workers. All devices of this worker get the sums.

    The last layer comes first: reading a gradient waits only until it is computed, and while MPI sums it, the engine
    computes those of the layers before it.
    """
    for name in reversed(grads[0]):
        total = nd.array(group.all_reduce(grads[0][name].asnumpy()))
        for of_device in grads:
            total.copyto(of_device[name])
