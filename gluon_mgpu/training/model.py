"""The interface between the training loop and a lesson. `models` implements it for each kind of lesson."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.support.errors import Error
from gluon_mgpu.training.config import Config

VELOCITY = "velocity/"  # in checkpoints, the name of a velocity is this prefix and the parameter's name


class Model(ABC):
    """A network with a replica on each device in ctx, trained with the functions of a lesson."""

    draws = True  # whether a step may draw random numbers
    running_stats: Sequence[str] = ()  # names of the running statistics of batch normalization in `arrays`

    def __init__(self, lesson: ModuleType, ctx: list[Context], config: Config, image_shape: Sequence[int]) -> None:
        self.lesson, self.ctx, self.config, self.image_shape = lesson, ctx, config, tuple(image_shape)

    @abstractmethod
    def step(self, X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        """Run the lesson's `train_batch` on images X (n, *image_shape) and labels y (n,). Returns each shard's losses,
        without waiting for them."""

    @abstractmethod
    def predict(self, X: NDArray) -> NDArray:
        """Compute the scores (n, classes) of images X (n, *image_shape) on X's device, without waiting for them."""

    @abstractmethod
    def arrays(self, device: int = 0) -> dict[str, NDArray]:
        """The arrays of one device: parameters, running statistics, and velocities (with momentum)."""

    @abstractmethod
    def export(self, prefix: str) -> None:
        """Write PREFIX-symbol.json and PREFIX-0000.params, as HybridBlock.export does. Raises UsageError if the network
        has no graph."""

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Set all replicas. arrays: as in `arrays`. Raises Error if their names or shapes do not match this network."""
        self._check_match(arrays)
        for device in range(len(self.ctx)):
            for name, array in self.arrays(device).items():
                nd.array(arrays[name]).copyto(array)  # array[:] fails on weights in a oneDNN layout

    def _check_match(self, arrays: dict[str, np.ndarray]) -> None:
        ours, others = ({name: array.shape for name, array in found.items()} for found in (self.arrays(), arrays))
        if ours != others:
            (name, shape), *_ = sorted({*ours.items()} ^ {*others.items()})
            where = "only the checkpoint has" if others.get(name) == shape else "the checkpoint lacks"
            raise Error(f"the checkpoint is from a different network or lesson: {where} {name} {shape}")

    def evaluate_accuracy(self, data_iter: Iterable[tuple[NDArray, NDArray]]) -> float:
        return self.lesson.evaluate_accuracy(data_iter, self.predict, self.ctx)

    # The parts of a step, which `step.assemble` puts together

    @abstractmethod
    def forward_backward(self, Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
        """Compute the gradients of each shard on its device. Returns the losses of each shard."""

    @abstractmethod
    def allreduce(self) -> None:
        """Sum the gradients over the devices of this process."""

    @abstractmethod
    def update(self, lr: float, batch_size: int) -> None:
        """Update each replica with its gradients, which are sums over batch_size examples."""

    def split_and_load(self, data: NDArray) -> list[NDArray]:
        return self.lesson.split_and_load(data, self.ctx)

    def grads(self, device: int = 0) -> dict[str, NDArray]:
        """The gradients on one device, by the names of their parameters."""
        return {name: array.grad for name, array in self.arrays(device).items() if array.grad is not None}


def read_arrays(model: Any, device: int = 0) -> dict[str, np.ndarray]:
    """Read the arrays of a model, or of another object with a method `arrays`, on one device. See `Model.arrays`."""
    nd.waitall()  # a forward pass that is still running may change the layout of weights
    return {name: array.asnumpy() for name, array in model.arrays(device).items()}
