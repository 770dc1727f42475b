"""A training step with what the notebooks' step lacks: shares, and several workers.

The step consists of the lesson's own functions, which a model provides. Without shares, and in a single process, a step
is the lesson's `train_batch` itself.
"""

from __future__ import annotations

from collections.abc import Callable

from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu.data.splitting import split
from gluon_mgpu.training.model import Model
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
        average_running_stats(model, losses, X.shape[0], group, X.shape[0] / batch_size)
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


def average_running_stats(
    model: Model, losses: list[NDArray], examples: int, group: Group, fraction: float = 1.0
) -> None:
    """Average batch normalization's running statistics over the devices and workers, weighted by the number of
    examples, so that all replicas give the same result in an evaluation.

    losses: of each shard. examples: their number. fraction: this worker's fraction of the whole batch.
    """
    ctx, names = model.ctx, model.running_stats
    if not names or len(ctx) * group.size == 1:
        return
    arrays = [model.arrays(i) for i in range(len(ctx))]
    weighted = []
    for i, c in enumerate(ctx):
        weight = sum(shard.shape[0] for shard in losses if shard.context == c) / examples
        # A hybridized network's backward pass writes the statistics without telling the engine. Reading an element of
        # the gradient that is computed last makes the engine wait for the whole backward pass.
        last = next(iter(model.grads(i).values())).reshape(-1)[:1]
        weighted.append(nd.concat(*[arrays[i][name] for name in names], last, dim=0) * weight)
    average = nd.add_n(*[x.as_in_context(ctx[0]) for x in weighted])
    if group.size > 1:
        average = nd.array(group.all_reduce((average * fraction).asnumpy()))
    for i, c in enumerate(ctx):
        on_device, start = average.as_in_context(c), 0
        for name in names:
            size = arrays[i][name].shape[0]
            on_device[start : start + size].copyto(arrays[i][name])
            start += size
