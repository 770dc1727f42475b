"""A training step with what the notebooks' step lacks: gradient accumulation, clipping, shares, several workers, and
momentum and weight decay in array lessons.

The step consists of the lesson's own functions, which a model provides. Without any of these, a step is the lesson's
`train_batch` itself.
"""

from __future__ import annotations

from collections.abc import Callable

from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu.data.splitting import split, split_batch
from gluon_mgpu.training.model import Model
from gluon_mgpu.training.workers import Group

Step = Callable[[NDArray, NDArray, float], list[NDArray]]  # (X, y, lr) -> the losses of each shard


def extended(model: Model, group: Group) -> Step:
    """Returns the step for a model's settings. With several workers, X and y are this worker's part of the batch."""
    config = model.config

    def shards(data: NDArray) -> list[NDArray]:
        return split(data, model.ctx, config.shares) if config.shares else model.split_and_load(data)

    def step(X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        batch_size = int(group.sum(X.shape[0]))
        losses = []
        if config.grad_accum_steps > 1:  # each backward pass then adds to the gradients
            for i in range(len(model.ctx)):
                for grad in model.grads(i).values():
                    grad[:] = 0
        for X_part, y_part in split_batch(X, y, config.grad_accum_steps):
            losses += model.forward_backward(shards(X_part), shards(y_part))
        model.allreduce()
        grads = [model.grads(i) for i in range(len(model.ctx))]
        if group.size > 1:
            _sum_over_workers(grads, group)
        if config.max_grad_norm:
            for of_device in grads:  # gradients are sums, but max_grad_norm limits the norm of the mean
                clip_grad_norm(list(of_device.values()), config.max_grad_norm * batch_size)
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
        total = nd.array(group.allreduce(grads[0][name].asnumpy()))
        for of_device in grads:
            total.copyto(of_device[name])


def clip_grad_norm(grads: list[NDArray], max_norm: float) -> None:
    """Scale one device's gradients so that their global norm is at most max_norm."""
    largest = nd.max(nd.stack(*[nd.max(nd.abs(grad)) for grad in grads]))  # the squares could overflow
    largest = nd.maximum(largest, 1e-30)
    norm = nd.sqrt(nd.sum(nd.stack(*[nd.sum(nd.square(nd.broadcast_div(g.reshape(-1), largest))) for g in grads])))
    scale = nd.minimum(max_norm / largest / nd.maximum(norm, 1e-30), 1)
    for grad in grads:
        grad[:] = nd.broadcast_mul(grad, scale.reshape((1,) * grad.ndim))


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
        average = nd.array(group.allreduce((average * fraction).asnumpy()))
    for i, c in enumerate(ctx):
        on_device, start = average.as_in_context(c), 0
        for name in names:
            size = arrays[i][name].shape[0]
            on_device[start : start + size].copyto(arrays[i][name])
            start += size
