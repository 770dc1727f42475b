"""A network with a replica on each device, as the training loop uses it, and extras that the notebooks' step lacks.

With all extras off, a step is the lesson's `train_batch`. Otherwise, it is `Replicas.extended_step`, which calls the
same functions of the lesson. `gluon_mgpu.implementations` has the classes for lessons with arrays and with Gluon.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.data.splitting import split_batch, split_by_shares
from gluon_mgpu.distributed.workers import ALONE, Workers
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error, UsageError, reason
from gluon_mgpu.training.settings import Settings

LENET = ("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4")  # names of LeNet's arrays in checkpoints
VELOCITY = "velocity/"  # in a state_dict, a velocity's name is this prefix followed by the parameter's name
RUNNING_STATS = ("running_mean", "running_var")  # suffixes of the names of batch normalization's running statistics


class Replicas(ABC):
    """A network with a replica on every device of ctx, trained with the functions of a lesson.

    A derived class sets `model`, the lesson's own form of the network, and `arrays`: one dict {name: NDArray} per
    device, with the parameters and the running statistics. Arrays that are trained have a gradient attached.
    """

    model: Any
    arrays: list[dict[str, NDArray]]
    unused: tuple[str, ...] = ()  # settings that have no effect, and are not recorded
    smallest_batch = 1  # the number of examples that a step needs

    def __init__(
        self,
        lesson: ModuleType,
        ctx: list[Context],
        settings: Settings,
        workers: Workers = ALONE,
        image_shape: Sequence[int] = IMAGE_SHAPE,
    ) -> None:
        engine.check(ctx)
        self.lesson, self.ctx, self.settings, self.workers = lesson, ctx, settings, workers
        self.image_shape = tuple(image_shape)
        self._batch_size, self._part = 0, 0.0  # of the last step: the global batch size, and this worker's part of it

    # What lessons do differently

    @abstractmethod
    def rule(self, lr: float) -> Any:
        """The last argument of the lesson's `train_batch`, which determines the update."""

    @abstractmethod
    def predict(self, X: NDArray) -> NDArray:
        """Compute the scores (n, classes) of images X (n, *image_shape) on X's device, without waiting for them."""

    @abstractmethod
    def velocities(self, device: int) -> dict[str, NDArray]:
        """Returns the velocities on one device, as {name: velocity}. Without momentum, the dict is empty."""

    # Parts of `extended_step`; a class without them does not use it

    def allreduce(self) -> None:
        """Sum the gradients over the devices of this process."""
        raise NotImplementedError

    def update(self, lr: float, batch_size: int) -> None:
        """Update each replica with its gradients, which are sums over batch_size examples."""
        raise NotImplementedError

    # A step

    @property
    def extras(self) -> bool:
        """Whether a step needs more than the lesson's train_batch."""
        s = self.settings
        return bool(s.grad_accum_steps > 1 or s.max_grad_norm or s.shares or self.workers.count > 1)

    def train_batch(self, X: NDArray | None, y: NDArray | None, lr: float, batch_size: int = 0) -> list[NDArray]:
        """Run one step on images X (n, *image_shape) and labels y (n,). Returns each shard's losses, without waiting.

        batch_size: the size of the global batch, required if there are several workers. X and y are then this worker's
        part of the global batch, or None if the worker has no examples.
        """
        own = 0 if X is None else X.shape[0]
        if self.workers.count > 1 and batch_size != self._batch_size:  # this is true on all workers at the same step
            self.sync_running_stats()
            self._batch_size, self._part = batch_size, own / batch_size
        if self.extras or own < len(self.ctx):
            losses = self.extended_step(X, y, lr, batch_size or own)
        else:
            losses = self.lesson.train_batch(X, y, self.model, self.ctx, self.rule(lr))
        if self.running_stats and len(self.ctx) > 1 and own:
            self._average_running_stats(losses, own)
        return losses

    def extended_step(self, X: NDArray | None, y: NDArray | None, lr: float, batch_size: int) -> list[NDArray]:
        """Run a step with any of the extras: gradient accumulation, shares, devices without examples, several workers,
        clipping, or an update with momentum or weight decay."""
        s = self.settings
        if s.grad_accum_steps > 1 or X is None or X.shape[0] < len(self.ctx):
            self.zero_grad()
        losses: list[NDArray] = []
        if X is not None and y is not None:
            for X_part, y_part in split_batch(X, y, s.grad_accum_steps):
                losses += self.forward_backward(self.split(X_part), self.split(y_part))
        self.allreduce()
        if self.workers.count > 1:
            self._sum_over_workers()
        if s.max_grad_norm:
            for grads in self.grads():  # gradients are sums, but max_grad_norm limits the norm of the mean
                clip_grad_norm(list(grads.values()), s.max_grad_norm * batch_size)
        self.update(lr, batch_size)
        return losses

    def split(self, data: NDArray) -> list[NDArray]:
        """Split a batch across the devices: by the shares in the settings, or, without shares, as in the lesson."""
        shares = self.settings.shares
        if shares:
            return split_by_shares(data, self.ctx, shares)
        return self.lesson.split_and_load(data, self.ctx)

    def forward_backward(self, Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
        return self.lesson.forward_backward(self.model, Xs, ys)

    def evaluate_accuracy(self, data_iter: Iterable[tuple[NDArray, NDArray]]) -> float:
        return self.lesson.evaluate_accuracy(data_iter, self.predict, self.ctx)

    def grads(self) -> list[dict[str, NDArray]]:
        """The gradients of the arrays that are trained: one dict {name: gradient} per device.

        After a step of `tuning.Trainer`, the sum of a gradient over all devices may be on one device only.
        """
        return [
            {name: array.grad for name, array in arrays.items() if array.grad is not None} for arrays in self.arrays
        ]

    def zero_grad(self) -> None:
        for arrays in self.arrays:
            for array in arrays.values():
                if array.grad is not None:
                    array.grad[:] = 0
                    array._fresh_grad = True  # otherwise, Trainer rejects a gradient that no backward pass has computed

    def _sum_over_workers(self) -> None:
        """Sum the gradients over all workers. All devices of this worker get the sums."""
        for key, grads in enumerate(zip(*(of_device.values() for of_device in self.grads()))):
            self.workers.allreduce(grads[0], key)
            for grad in grads[1:]:
                grads[0].copyto(grad)

    def check_scores(self, classes: int, exactly: bool) -> None:
        """Raise UsageError unless the network accepts images of image_shape, and returns `classes` scores for each.

        exactly: whether more scores are an error too.
        """
        try:
            shape = self.predict(nd.zeros((1, *self.image_shape), ctx=self.ctx[0])).shape
        except (mx.MXNetError, ValueError, AssertionError) as error:
            raise self.unfit(f"does not accept images of shape {self.image_shape} ({reason(error)})") from None
        if shape[:1] != (1,) or len(shape) != 2 or shape[1] < classes or (exactly and shape[1] > classes):
            raise self.unfit(f"returns scores of shape {shape} for one image, but needs (1, {classes})")

    def unfit(self, why: str) -> UsageError:
        """The error for a network that does not fit the data."""
        name, value = ("impl", self.settings.impl) if self.settings.model == "lenet" else ("model", self.settings.model)
        own = "" if name == "model" else "; copy scratch.py or highlevel.py, change its network, and pass your file"
        return UsageError(name, value, f"the network {why}{own}")

    # Running statistics of batch normalization

    @property
    def running_stats(self) -> list[str]:
        """The names of batch normalization's running statistics: arrays that each device updates without gradients."""
        return [name for name in self.arrays[0] if name.endswith(RUNNING_STATS)]

    def _average_running_stats(self, losses: list[NDArray], n: int) -> None:
        """Average the running statistics over the devices, weighted by the number of examples, so that all devices give
        the same result in an evaluation."""
        flat = []
        for c, arrays, grads in zip(self.ctx, self.arrays, self.grads()):
            weight = sum(x.shape[0] for x in losses if x.context == c) / n
            # A hybridized network's backward pass writes the statistics without telling the engine. Reading an element
            # of the gradient that is computed last makes the engine wait for the whole backward pass.
            last = next(iter(grads.values())).reshape(-1)[:1]
            flat.append(nd.concat(*[arrays[name] for name in self.running_stats], last, dim=0) * weight)
        self._set_running_stats(nd.add_n(*[x.as_in_context(self.ctx[0]) for x in flat]))

    def sync_running_stats(self) -> None:
        """Average the running statistics over the workers, weighted by the number of examples. All workers call this.

        Each step updates the statistics linearly, so averaging once after several steps gives the same result as
        averaging after each step. The engine does not track these updates, so this method waits for all earlier steps,
        and later steps wait for it.
        """
        if self.workers.count == 1 or not self.running_stats or not self._batch_size:
            return
        nd.waitall()
        own = nd.concat(*[self.arrays[0][name] for name in self.running_stats], dim=0).as_in_context(mx.cpu())
        average = own * self._part
        self.workers.allreduce(average, "statistics")
        self._set_running_stats(average)
        nd.waitall()

    def _set_running_stats(self, average: NDArray) -> None:
        for c, arrays in zip(self.ctx, self.arrays):
            here, start = average.as_in_context(c), 0
            for name in self.running_stats:
                size = arrays[name].shape[0]
                here[start : start + size].copyto(arrays[name])
                start += size

    # State

    def parameters(self, device: int = 0) -> dict[str, np.ndarray]:
        """Return the parameters and running statistics on one device: {name: NumPy array}. device: its index in ctx."""
        nd.waitall()  # a forward pass that is still running may change the layout of weights (docs/engine.md)
        return {name: array.asnumpy() for name, array in self.arrays[device].items()}

    def differing(self) -> list[str]:
        """The names of the parameters and running statistics that are not the same, bit for bit, on all devices."""
        first, *others = [self.parameters(device) for device in range(len(self.ctx))]
        return [name for name in first if any(first[name].tobytes() != other[name].tobytes() for other in others)]

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint: the parameters by name, and the velocities as "velocity/name"."""
        velocities = {VELOCITY + name: array.asnumpy() for name, array in self.velocities(0).items()}
        return {**self.parameters(), **velocities}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Set all replicas to a `state_dict`. Raises Error if its names or shapes do not match this network."""
        expected = self.state_dict()
        if {name: a.shape for name, a in state.items()} != {name: a.shape for name, a in expected.items()}:
            raise Error("the checkpoint holds the parameters of a different network")
        for device, arrays in enumerate(self.arrays):
            velocities = {VELOCITY + name: array for name, array in self.velocities(device).items()}
            for name, array in {**arrays, **velocities}.items():
                nd.array(state[name]).copyto(array)  # array[:] fails on weights in a oneDNN layout


def clip_grad_norm(grads: list[NDArray], max_norm: float) -> None:
    """Scale one device's gradients so that their global norm is at most max_norm."""
    norm = nd.sqrt(nd.sum(nd.stack(*[nd.sum(nd.square(grad)) for grad in grads])))
    scale = nd.minimum(max_norm / (norm + 1e-8), 1)
    for grad in grads:
        grad[:] = nd.broadcast_mul(grad, scale.reshape((1,) * grad.ndim))
