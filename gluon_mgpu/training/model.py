"""The interface between the training loop and a lesson. `models` implements it for each kind of lesson."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from numbers import Real
from types import ModuleType
from typing import Any

import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.lessons import name_of

LENET_NAMES = ("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4")  # names of LeNet's arrays in checkpoints
VELOCITY = "velocity/"  # in checkpoints, the name of a velocity is this prefix and the parameter's name


class Model(ABC):
    """A network with a replica on each device in ctx, trained with the functions of a lesson."""

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
        arrays = self._with_todays_names(arrays)
        self._check_match(arrays)
        for device in range(len(self.ctx)):
            for name, array in self.arrays(device).items():
                nd.array(arrays[name]).copyto(array)  # array[:] fails on weights in a oneDNN layout

    def _with_todays_names(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Earlier versions named the arrays of any network of eight arrays as LeNet's."""
        names = [name for name in self.arrays() if not name.startswith(VELOCITY)]
        if len(names) != len(LENET_NAMES) or not arrays.keys() >= {*LENET_NAMES}:
            return arrays
        now = dict(zip(LENET_NAMES, names))
        now |= {VELOCITY + name: VELOCITY + other for name, other in now.items()}
        return {now.get(name, name): array for name, array in arrays.items()}

    def _check_match(self, arrays: dict[str, np.ndarray]) -> None:
        ours, others = ({name: array.shape for name, array in found.items()} for found in (self.arrays(), arrays))
        if ours != others:
            (name, shape), *_ = sorted({*ours.items()} ^ {*others.items()})
            where = "only the checkpoint has" if others.get(name) == shape else "the checkpoint lacks"
            raise Error(f"the checkpoint is from a different network or lesson: {where} {name} {shape}")

    def evaluate_accuracy(self, data_iter: Iterable[tuple[NDArray, NDArray]]) -> float:
        accuracy = self.lesson.evaluate_accuracy(data_iter, self.predict, self.ctx)
        if not (isinstance(accuracy, Real) and 0 <= float(accuracy) <= 1):
            raise self.wrong("evaluate_accuracy", accuracy, "a number from 0 to 1")
        return float(accuracy)

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

    @abstractmethod
    def split_and_load(self, data: NDArray) -> list[NDArray]:
        """Split a batch into one shard per device."""

    def wrong(self, function: str, returned: object, right: str) -> UsageError:
        """The error for a function of the lesson that returns something wrong."""
        advice = "add its return statement" if returned is None else f"it must return {right}"
        return UsageError("impl", name_of(self.lesson), f"{function} returned {returned!r:.60}; {advice}")

    def grads(self, device: int = 0) -> dict[str, NDArray]:
        """The gradients on one device, by the names of their parameters."""
        return {name: array.grad for name, array in self.arrays(device).items() if array.grad is not None}


def read_arrays(model: Any, device: int = 0) -> dict[str, np.ndarray]:
    """Read the arrays of a model, or of another object with a method `arrays`, on one device. See `Model.arrays`."""
    nd.waitall()  # a forward pass that is still running may change the layout of weights
    return {name: array.asnumpy() for name, array in model.arrays(device).items()}
