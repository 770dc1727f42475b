"""The arrays that a lesson itself keeps from step to step, such as velocities.

Checkpoints hold those that the lesson's function `state(device)` returns.
"""

from __future__ import annotations

import inspect

import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training.checkpoint import STATE, Arrays
from gluon_mgpu.training.lessons import Lesson
from gluon_mgpu.training.workers import Group

EXAMPLE = "return a dict of NDArrays, such as {'v0': array}"


class LessonState:
    """What a lesson's `state` returns for each device, in all workers.

    Raises UsageError, here or in `read`, if it returns anything but NDArrays, or copies of what the lesson keeps, or if
    names or shapes differ between two workers or from those before the first step.
    """

    def __init__(self, lesson: Lesson, devices: int, group: Group) -> None:
        self.function, self.devices, self.group = lesson.module.state, range(devices), group
        self.name = f"{lesson.name}: state"
        self.shapes = self._shapes(self.local())
        advice = "it must return the same names and shapes in all workers"
        group.agree({f"{self.name}'s array {name}": shape for name, shape in self.shapes.items()}, advice)
        self._check_kept()

    def read(self) -> Arrays:
        """The arrays of all workers, by their names in a checkpoint, "state/WORKER/DEVICE/NAME"."""
        local = self.local()
        if different := {*self._shapes(local).items()} ^ {*self.shapes.items()}:
            which = "{} {}".format(*min(different))
            advice = "it must return the same names and shapes after a step as before: create the arrays in get_params"
            raise UsageError(None, self.name, f"{advice} or initialize ({which} is not in both)")
        arrays = {name: array.asnumpy() for name, array in local.items()}
        of_workers = [self.group.broadcast_arrays(arrays, worker) for worker in range(self.group.size)]
        return {f"{STATE}{worker}/{name}": a for worker, of_one in enumerate(of_workers) for name, a in of_one.items()}

    def load(self, saved: Arrays) -> None:
        """Give the lesson of each worker its arrays. saved: those of all workers, in worker 0. Raises Error if names or
        shapes differ from the lesson's."""
        now = self.read()
        if self.group.rank == 0:
            shapes, others = ({name: array.shape for name, array in some.items()} for some in (now, saved))
            if different := {*shapes.items()} ^ {*others.items()}:
                which = "{} {}".format(*min(different))
                advice = "resume with the run's lesson, devices and workers"
                raise Error(f"the checkpoint's state differs from that of the lesson ({which}); {advice}")
            now = {name: saved[name] for name in now}
        state = self.group.broadcast_arrays(now)
        for name, array in self.local().items():
            nd.array(state[f"{STATE}{self.group.rank}/{name}"], dtype=array.dtype).copyto(array)

    def local(self) -> dict[str, NDArray]:
        """This worker's arrays: {"DEVICE/NAME": array}, where DEVICE is an index in ctx."""
        arrays = {}
        for device in self.devices:
            try:
                inspect.signature(self.function).bind(device)
            except TypeError:
                raise UsageError(None, self.name, "it must take one argument, the index of a device") from None
            returned = self.function(device)
            if not isinstance(returned, dict):
                raise UsageError(None, self.name, f"it returned {type(returned).__name__}; {EXAMPLE}")
            for name, array in returned.items():
                if not isinstance(array, NDArray):
                    raise UsageError(None, self.name, f"{name!r} is {type(array).__name__}; {EXAMPLE}")
                arrays[f"{device}/{name}"] = array
        return arrays

    def _check_kept(self) -> None:
        """Raise UsageError if `state` returns copies, because the lesson would not see what `load` writes into them."""
        for name, array in self.local().items():
            before = array.asnumpy()
            try:
                nd.array(before == 0, dtype=array.dtype).copyto(array)  # differs from every element, also inf and 1e38
                is_kept = (self.local()[name].asnumpy() != before).any()
            finally:
                nd.array(before, dtype=array.dtype).copyto(array)
            if array.size and not is_kept:
                raise UsageError(None, self.name, f"{name} is a copy; return the array that the step changes")

    @staticmethod
    def _shapes(arrays: dict[str, NDArray]) -> dict[str, str]:
        return {name: f"{array.shape} {np.dtype(array.dtype)}" for name, array in arrays.items()}
