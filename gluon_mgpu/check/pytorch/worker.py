"""One of the processes that take the steps: it makes its own state, takes the steps, and sends what they do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as Dropout

import gluon_mgpu.check.pytorch.compiler as compiler
import gluon_mgpu.check.reached as reached
from gluon_mgpu.check.driver import Arrays, Facts, Options, StepResult
from gluon_mgpu.check.processes import Send
from gluon_mgpu.check.pytorch.float64 import Float64
from gluon_mgpu.check.pytorch.normalization import Normalization
from gluon_mgpu.check.pytorch.program import Batch, Program, seed_all
from gluon_mgpu.check.pytorch.state import State
from gluon_mgpu.check.pytorch.tensors import array_of, copy_of, leaves, own_copy, set_last, with_gradients
from gluon_mgpu.check.pytorch.trace import Event, traced_modules
from gluon_mgpu.check.pytorch.watch import Watch


@dataclass
class Start:
    """What a process sends before the first step."""

    facts: Facts
    tensors: Arrays


@dataclass
class Taken:
    """What a process sends after a step. result: its part. done, limits: what it has reached."""

    facts: Facts
    result: StepResult
    done: reached.Done
    limits: dict[str, bool]


@dataclass
class Worker:
    """Takes a step with each batch in one process. options: see `Driver.run`. The others are for this driver."""

    program: Program
    rank: int
    world: int
    batches: Sequence[Batch]
    options: Options
    events: Sequence[Sequence[Sequence[Event]]] = ()  # for each step: what each of several processes noted in it
    probe: bool = False  # find the examples whose gradients a step computes
    trace: bool = False  # note what each module computes, and `_kept`

    def take_steps(self, send: Send) -> None:
        """Send a `Start`, and a `Taken` for each step."""
        self._prepare()
        with self.precision:
            self.program.load()
        drawn = self.program.whole(self.batches)
        seed_all(self.rank)
        with self.precision:
            self._make()
            send(Start(self.facts, self.tensors))
            seed_all(1000 * self.options.seed + self.rank)
            for i, (batch, data) in enumerate(zip(self.batches, drawn)):
                send(self._step(i, batch, data))
                if self.options.clear:
                    for p in self.left:
                        p.grad = torch.zeros_like(p.grad)

    def _prepare(self) -> None:
        """Change PyTorch in this process, as the options say."""
        options, is_last = self.options, self.rank == self.world - 1
        if options.double or self.world == 1:
            compiler.compile_nothing()
        compiler.leave_out()
        self.watch = Watch(options.clips)
        self.precision = Float64(self.watch.note_precision) if options.double else nullcontext()
        if options.factor != 1 and (math.isfinite(options.factor) or is_last):
            scale_gradients(options.factor)

    def _make(self) -> None:
        """Make the state, and note what is in it."""
        self.given = self.program.make(self.rank, self.world)
        self.state = self._find_state()
        modules = self.state.modules
        for module in modules:
            if hasattr(module, "set_force_sum_reduction_for_comms"):  # of FSDP: gloo has no PREMUL_SUM
                module.set_force_sum_reduction_for_comms(True)
        is_switched = switch_dropout_off(modules)
        named = self.state.named_modules()
        normalized = {name: m for name, m in named.items() if isinstance(m, BatchNorm) and m.training}
        normalized = {name: m for name, m in normalized.items() if not is_synced(m)}
        if self.program.reference:  # it knows what is to be compared
            normalized = {}
        self.noted = named if self.trace else normalized
        is_divided = self.world == 1 and self.options.shards
        self.normalization = Normalization(normalized) if is_divided else None
        self.facts = facts_of(self.state, bool(normalized), is_data_parallel=not self.program.reference)
        self.facts.how = ["with dropout off"] * is_switched + self.watch.unseen
        if self.program.trains_given:
            self.facts.soft = []
        if self.world == 1:
            self.watch.watch_backward(self.state.tensors)
        self.tensors, self.marks = self.state.read(), self.state.marks()
        self.soft = {name: self.tensors.pop(name) for name in self.facts.soft}

    def _find_state(self) -> State:
        return State(self.program.named(self.given), self.program.function())

    def _step(self, i: int, batch: Batch, drawn: Any) -> Taken:
        """Take step i."""
        done, events = reached.Done(), list[Event]()
        data = self._copy(batch, drawn)
        part = self.program.part(data, len(batch), self.rank, self.world)
        take_step = self.world == 1 and self.program.reference or self.program.step
        self.watch.clear()
        if self.normalization:
            self.normalization.start(self.events[i] if i < len(self.events) else (), self.options.shards[i])
        with traced_modules(self.noted, events), reached.traced(done) if self._is_new() else nullcontext():
            returned = take_step(self.given, part)
        if self.world > 1:
            self.watch.refuse_unfinished()
        result = self._result(returned)
        result.examples = [with_gradients(data, len(batch)) if self.probe else []]
        result.modules = [events]
        return Taken(self.facts, result, done, self.watch.limits)

    def _copy(self, batch: Batch, drawn: Any) -> Any:
        """This process's own copy of a batch."""
        scale = self.options.scale
        factor = scale if math.isfinite(scale) else 1
        own = partial(own_copy, double=self.options.double, requires_grad=self.probe, factor=factor)
        data = copy_of(drawn, batch.n, batch.examples, own)
        if scale != factor:
            set_last(data, len(batch), scale)
        return data

    def _is_new(self) -> bool:
        """Whether the lines that run are to be noted, which takes long; most sessions run the same lines."""
        options = self.options
        is_stress = (options.factor, options.scale) != (1, 1)
        return is_stress or not (options.double or options.seed or self.trace)

    def _result(self, returned: Any) -> StepResult:
        """What a step has done, and what it has left. returned: by the step."""
        self.state, watch, before = self._find_state(), self.watch, self.tensors
        tensors = self.state.tensors
        after = {**before, **self.state.read()}
        changes = {name: after[name] - a for name, a in before.items() if after[name].shape == a.shape}
        self.tensors = {name: after[name] for name in before}  # without arrays that the step has created
        moves = any(a.any() for a in changes.values())
        self.left = [p for p in tensors.values() if moves and p.is_leaf and p.grad is not None and p.grad.any()]
        self.facts.adaptive, self.facts.low = watch.is_adaptive, watch.low
        self.facts.left = self.facts.left or bool(self.left)
        losses = [array_of(a).ravel() for a in leaves(returned) if isinstance(a, Tensor)]
        soft = {name: after[name] for name, a in self.soft.items() if not np.array_equal(after.get(name, a), a)}
        return StepResult(
            changes=[changes],
            grads=[{name: np.stack(watch.grads[p]) for name, p in tensors.items() if p in watch.grads}],
            losses=losses if len(losses) == 1 else [np.zeros(0)],
            rest=[self._kept(after) if self.trace else {**self.state.changed(self.marks), **soft}],
            rates=[watch.rates],
            raw=[watch.raw],
        )

    def _kept(self, tensors: Arrays) -> Arrays:
        """What optimizers keep, and what the step is given besides parameters, whether it has changed or not."""
        return {**self.state.of_optimizers(), **{name: a for name, a in tensors.items() if name in self.soft}}


def facts_of(state: State, is_normalized: bool, is_data_parallel: bool) -> Facts:
    """What a state tells before the first step."""
    tensors, modules = state.tensors.items(), state.modules
    facts = Facts(normalized=is_normalized, soft=state.soft())
    facts.others = [*state.others, *facts.soft]
    facts.params = [name for name, a in tensors if a.requires_grad]
    if is_data_parallel:
        of_norms = {id(b) for m in modules if isinstance(m, NormBase) and not is_synced(m) for b in m.buffers()}
        sent = {id(b) for m in modules if getattr(m, "broadcast_buffers", False) for b in m.buffers()}
        facts.statistics = [name for name, a in tensors if id(a) in of_norms]
        facts.synced = [name for name, a in tensors if id(a) in of_norms & sent]
        if any(hasattr(a, "placements") for _, a in tensors) and not any(hasattr(m, "unshard") for m in modules):
            facts.reason = (
                "its parameters are divided by tensor parallelism, and only data parallelism is checked; pass "
                "reference="
            )
    return facts


def is_synced(module: nn.Module) -> bool:
    """Whether batch normalization computes the statistics of all processes."""
    return isinstance(module, nn.SyncBatchNorm)


def scale_gradients(factor: float) -> None:
    """Multiply the gradients with which each backward pass begins."""
    backward = torch.autograd.backward

    def scaled(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(tensors)
        # The tensor is scaled if it has no gradient yet: PyTorch imports sympy, for seconds, if it is given one
        tensors = [t * factor if g is None else t for t, g in zip(tensors, grads)]
        backward(tensors, [None if g is None else g * factor for g in grads], *args, **options)

    torch.autograd.backward = scaled


def switch_dropout_off(modules: Sequence[nn.Module]) -> bool:
    """Returns whether there was any."""
    found = False
    for module in modules:
        name = "p" if isinstance(module, Dropout) else "dropout"
        rate = getattr(module, name, None)
        if isinstance(rate, float) and rate > 0:
            setattr(module, name, 0.0)
            found = True
    return found
