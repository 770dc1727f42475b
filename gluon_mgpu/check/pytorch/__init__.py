"""Takes the steps of PyTorch code in several processes over gloo and in one, each time with a fresh copy of the code.

`compare_file` is for `gluon-mgpu check FILE.py`; `parallel` takes three functions instead. Each side is a group of
processes, forks of this one. They exchange only what the step does; what they find goes to this one by pipes.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import gluon_mgpu.check.pytorch.compiler as compiler
import gluon_mgpu.check.pytorch.group as group
import gluon_mgpu.check.reached as reached
from gluon_mgpu.check.arrays import TOLERANCE, is_same, norm
from gluon_mgpu.check.driver import AS_WRITTEN, Claim, Driver, Options, Session, Shards, StepResult
from gluon_mgpu.check.judge import Report, compare
from gluon_mgpu.check.processes import Send
from gluon_mgpu.check.pytorch.program import Batch, FileProgram, Program, divided
from gluon_mgpu.check.pytorch.trace import Event, first_difference
from gluon_mgpu.check.pytorch.worker import Start, Taken, Worker

STRESS = {
    "with larger gradients": Options(factor=1e4),
    "with larger inputs": Options(scale=100.0),
    "if one process gets numbers that are not finite": Options(factor=math.nan, scale=math.nan),
}


def parallel(
    make: Callable[[int, int], Any],
    step: Callable[[Any, Any], Any],
    batch: Callable[[int, int], Any],
    processes: Sequence[int] = (2, 3),
    steps: int = 3,
    even: bool = False,
    reference: Callable[[Any, Any], Any] | None = None,
    divide: str = "contiguous",
    seconds: float = 60,
) -> Report:
    """Compare training steps in several processes with the same steps in one.

    make(rank, world): returns what a step needs: a network, an optimizer, a schedule, or any nest of these; called in
    each process, after dist.init_process_group. step(state, part): the body of the training loop. batch(i, n): batch i,
    of n examples: any nest of tensors, arrays and lists with one row per example. processes: how many to compare.
    steps: how many one after the other, before one with an uneven batch. even: uneven batches may differ; then there is
    a warning. reference(state, batch): the step in one process, if it is another. divide: how a process gets its part:
    "contiguous", "strided" as by DistributedSampler, or "none" if the step itself divides. seconds: the limit of a
    step.
    """
    compiler.import_early(getattr(getattr(make, "__code__", None), "co_filename", ""))
    program = Program(make, step, batch, reference, divide)
    return compare(PyTorch(program, seconds), processes, steps, even)


def compare_file(path: str, processes: Sequence[int], steps: int, even: bool, seconds: float) -> Report:
    """Compare the steps of a file with `train_batch` and `init_net` or `init_params`."""
    file = os.path.realpath(path)
    compiler.import_early(file)
    folder = str(Path(file).parent)
    sys.path.insert(0, folder)  # as for a script, but its modules hide none that are imported above
    try:
        return compare(PyTorch(FileProgram(file), seconds), processes, steps, even)
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


class PyTorch(Driver):
    """The driver of PyTorch. seconds: the limit of a step."""

    unit = "process"
    advice = {
        "not summed": "sum them in place, before the update (in DDP, in the last backward pass)",
        "replicas": "sum all gradients before the update, as DDP does in a backward pass that is not in no_sync",
        "statistics": "average or broadcast them, as DDP does",
        "left": "call zero_grad after each update",
    }
    infers = True
    still = (
        "compared",
        "the steps on one process change no array that is found; init_net or make must return what is trained, "
        "and an array must be changed, not replaced by a new one",
    )

    def __init__(self, program: Program, seconds: float) -> None:
        self.program, self.seconds = program, seconds
        self.events: dict[Any, list[list[list[Event]]]] = {}  # of steps in several processes: in each process
        self.done = reached.Done()
        self.limits: dict[str, bool] = {}  # see `Watch`

    def batch(self, i: int, n: int) -> Batch:
        batch = Batch(i, n)
        self.program.add(batch)
        return batch

    def take(self, batch: Batch, examples: Sequence[int]) -> Batch:
        return batch.take(examples)

    def split(self, k: int, batch: Batch, n: int) -> Shards | None:
        if self.program.divide != "none":
            return divided(self.program.divide, k, n)
        if self.program.reference:  # the processes of a tensor group share examples
            return None
        sessions = [self.run(count, [batch], probe=True) for count in (k, 1)]
        if not all(session.steps for session in sessions):
            return None
        examples, [used] = (session.steps[0].examples for session in sessions)
        return examples if all(examples) and used == [*range(n)] else None  # a mask leaves no gradient of some

    def run(
        self, k: int, batches: Sequence[Batch], options: Options = AS_WRITTEN, probe: bool = False, trace: bool = False
    ) -> Session:
        """probe: find the examples whose gradients a step computes. trace: note what each module computes, and what
        optimizers and the user keep."""
        key = (*batches, options.double, repr(options.factor), repr(options.scale))
        events = self.events.get(key, []) if k == 1 else []

        def take_steps(send: Send, rank: int, world: int) -> None:
            Worker(self.program, rank, world, batches, options, events, probe, trace).take_steps(send)

        outcome = group.run(k, take_steps, self.seconds)
        session = Session(failure=outcome.failure, late=outcome.late)
        for stage in outcome.stages:
            session.facts = stage[0].facts
            if isinstance(stage[0], Start):
                session.start = [start.tensors for start in stage]
            else:
                session.steps.append(_joined([taken.result for taken in stage]))
                for taken in stage:
                    self._note_reached(taken)
        if k > 1:
            self.events[key] = [step.modules for step in session.steps]
        return session

    def _note_reached(self, taken: Taken) -> None:
        reached.add(self.done, taken.done)
        for limit, is_reached in taken.limits.items():
            self.limits[limit] = self.limits.get(limit, False) or is_reached

    def finds_more(self, session: Session) -> bool:
        changed = {name for step in session.steps for name in step.rest[0]}
        self.program.trains_given = bool(changed & {*session.facts.soft})
        return self.program.trains_given

    def clips(self) -> bool:
        return any(is_reached for limit, is_reached in self.limits.items() if "clip_grad" in limit)

    def missed(self) -> list[str]:
        limits = [limit for limit, is_reached in self.limits.items() if not is_reached]
        return reached.missed(self.done) + sorted(limits)

    def stress(self) -> dict[str, Options]:
        return STRESS

    def kept_apart(self, k: int, batches: Sequence[Batch], options: Options) -> list[str]:
        steps = self._traced(k, batches, options)
        if not steps:
            return []
        several, [one] = (step.rest for step in steps)
        tolerance = TOLERANCE["float64" if options.double else "float32"]

        def is_apart(name: str, a: np.ndarray) -> bool:  # ZeRO keeps nothing for some parameters
            found = [rest[name] for rest in several if name in rest and rest[name].shape == a.shape]
            return not all(is_same(b, a, tolerance * norm(a)) for b in found)

        return [name for name, a in one.items() if is_apart(name, a)]

    def begins(self, k: int, batches: Sequence[Batch], options: Options) -> str:
        steps = self._traced(k, batches, options) if options.double else []
        return first_difference(steps[0].modules, *steps[1].modules) if steps else ""

    def _traced(self, k: int, batches: Sequence[Batch], options: Options) -> list[StepResult]:
        """The last of some steps in k processes and in one, with what only `trace` notes; empty if a step fails."""
        sessions = [self.run(count, batches, options, trace=True) for count in (k, 1)]
        is_complete = all(len(session.steps) == len(batches) for session in sessions)
        return [session.steps[-1] for session in sessions] if is_complete else []

    def checks(self, k: int, is_wrong: bool, note: Callable[[str], None]) -> Iterator[Claim]:
        if is_wrong or not isinstance(self.program, FileProgram) or not self.program.has_accuracy:
            return
        program = self.program

        def accuracy(send: Send, rank: int, world: int) -> None:
            compiler.leave_out()
            send(program.accuracy(rank, world))

        outcome = group.run(k, accuracy, self.seconds)
        failure = f"evaluate_accuracy fails: {outcome.failure}"
        yield "accuracy", outcome.stages[0][0] if outcome.stages else failure


def _joined(results: Sequence[StepResult]) -> StepResult:
    """What one step did, of what it did in each process."""
    parts = {field.name: [getattr(result, field.name) for result in results] for field in fields(StepResult)}
    return StepResult(**{name: [*chain.from_iterable(lists)] for name, lists in parts.items()})
