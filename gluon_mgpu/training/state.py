"""The arrays that a lesson itself keeps from step to step, such as velocities.

Checkpoints hold those that the lesson's function `state(device)` returns.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from mxnet import gluon, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training.checkpoint import STATE, Arrays
from gluon_mgpu.training.lessons import name_of
from gluon_mgpu.training.model import Model
from gluon_mgpu.training.workers import Group

EXAMPLE = "return a dict of NDArrays, such as {'v0': array}"


class LessonState:
    """What a lesson's `state` returns for each device, in all workers.

    Raises UsageError, here or in `read`, if it returns anything but NDArrays, or copies of what the lesson keeps, or if
    names or shapes differ between two workers or from those before the first step.
    """

    def __init__(self, model: Model, group: Group) -> None:
        self.lesson, self.devices, self.group = model.lesson, range(len(model.ctx)), group
        self.name = f"{name_of(self.lesson)}: state"
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

    def load(self, saved: Arrays, folder: Path | None) -> None:
        """Give the lesson of each worker its arrays. saved: those of all workers, in worker 0. folder: the run's.
        Raises Error if names or shapes differ from the lesson's."""
        now = self.read()
        if self.group.rank == 0:
            shapes, others = ({name: array.shape for name, array in some.items()} for some in (now, saved))
            if different := {*shapes.items()} ^ {*others.items()}:
                which = "{} {}".format(*min(different))
                advice = "resume with the run's lesson, devices and workers"
                raise Error(f"{folder}: the checkpoint's state differs from that of the lesson ({which}); {advice}")
            now = {name: saved[name] for name in now}
        state = self.group.broadcast_arrays(now)
        for name, array in self.local().items():
            nd.array(state[f"{STATE}{self.group.rank}/{name}"], dtype=array.dtype).copyto(array)

    def local(self) -> dict[str, NDArray]:
        """This worker's arrays: {"DEVICE/NAME": array}, where DEVICE is an index in ctx."""
        arrays = {}
        for device in self.devices:
            try:
                inspect.signature(self.lesson.state).bind(device)
            except TypeError:
                raise UsageError(None, self.name, "it must take one argument, the index of a device") from None
            returned = self.lesson.state(device)
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
            nd.array(before == 0, dtype=array.dtype).copyto(array)  # differs from every element, also inf and 1e38
            is_kept = (self.local()[name].asnumpy() != before).any()
            nd.array(before, dtype=array.dtype).copyto(array)
            if array.size and not is_kept:
                raise UsageError(None, self.name, f"{name} is a copy; return the array that the step changes")

    @staticmethod
    def _shapes(arrays: dict[str, NDArray]) -> dict[str, str]:
        return {name: f"{array.shape} {np.dtype(array.dtype)}" for name, array in arrays.items()}


class UnsavedArrays:
    """Prints a notice if the second step changes variables of a lesson's module, which no checkpoint holds: arrays and
    numbers, also in attributes of its own objects, and a gluon.Trainer. The first step may only fill caches."""

    def __init__(self, lesson: ModuleType, state: LessonState | None) -> None:
        self.lesson, self.state, self.steps, self.before = lesson, state, 0, dict[str, int]()

    def after_step(self) -> None:
        """Waits for the first two steps."""
        self.steps += 1
        if self.steps > 2:
            return
        saved = self.state.local() if self.state else {}
        self.saved = {id(array): array for array in saved.values()}
        kept = {name: value for name, value in vars(self.lesson).items() if name[:2] != "__"}
        now = {name: zlib.crc32(b"".join(self._contents(value))) for name, value in kept.items()}
        if changed := sorted(name for name in now if self.before.get(name, now[name]) != now[name]):
            log.say(
                f"{name_of(self.lesson)}: each step changes {', '.join(changed)}, which a resumed run does not "
                "restore; to save arrays, define state(device) (docs/training.md)"
            )
        self.before = now

    def _contents(self, value: Any, depth: int = 0) -> Iterator[bytes]:
        if isinstance(value, gluon.Trainer):
            value = value.optimizer.num_update
        if id(value) in self.saved:
            return
        if isinstance(value, (NDArray, np.ndarray)):
            yield value.asnumpy().tobytes() if isinstance(value, NDArray) else value.tobytes()
        elif isinstance(value, (int, float)):
            yield repr(value).encode()
        elif depth < 4:  # objects may refer to each other
            if type(value).__module__ == self.lesson.__name__:
                value = getattr(value, "__dict__", value)
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            for part in parts:
                yield from self._contents(part, depth + 1)
