"""What a process sees of its steps in PyTorch: updates, gradients, precision, limits, and what it does not wait for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gluon_mgpu.check.driver import Arrays
from gluon_mgpu.check.pytorch.tensors import array_of
from gluon_mgpu.support.programs import is_users, users_line

COLLECTIVES = (
    "all_reduce broadcast reduce all_gather all_gather_into_tensor reduce_scatter_tensor gather scatter all_to_all "
    "all_to_all_single reduce_scatter"
).split()
SENDS = "isend irecv".split()
LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Watch:
    """Watches the steps of this process, from now on. clips: False: no gradient is clipped."""

    def __init__(self, clips: bool = True) -> None:
        self.grads: dict[Tensor, list[np.ndarray]] = {}  # of a parameter, at each step of an optimizer
        self.raw: Arrays = {}  # the gradients of the backward pass, before anything changes them
        self.rates: dict[str, float] = {}  # the settings of the optimizers at these steps
        self.optimizers: list[Optimizer] = []
        self.low = "float32"  # the lowest precision
        self.limits: dict[str, bool] = {}  # what may be clipped or skipped, and where; whether it was
        self.unseen: list[str] = []  # what this version of PyTorch does not show
        self._updates = self._depth = 0
        self._params: list[Tensor] = []
        self._works: list[Work] = []
        self._watch_updates()
        self._watch_precision()
        self._watch_works()
        self._watch_limits(clips)

    def clear(self) -> None:
        """Forget the step before."""
        self.grads.clear()
        self.raw.clear()
        self.rates.clear()
        self._updates = self._depth = 0
        self._versions = [p._version for p in self._params]

    @property
    def is_adaptive(self) -> bool:
        """Whether an optimizer may be one like Adam, or is unknown."""
        return not self.optimizers or any(type(optimizer).__name__ != "SGD" for optimizer in self.optimizers)

    def watch_backward(self, tensors: Mapping[str, Tensor]) -> None:
        """Note the sums of the gradients that backward passes compute, until a parameter is changed."""

        def add(name: str, grad: Tensor) -> None:
            if self._versions == [p._version for p in self._params]:
                self.raw[name] = self.raw.get(name, 0) + array_of(grad)

        watched = {n: p for n, p in tensors.items() if p.requires_grad and p.is_leaf and not hasattr(p, "placements")}
        for name, p in watched.items():
            hooks = p._backward_hooks or {}
            users = {number: hooks.pop(number) for number in [*hooks]}
            p.register_hook(functools.partial(add, name))
            p._backward_hooks.update(users)  # after ours, which is to see the gradient before they change it
        self._params = [*watched.values()]

    def _watch_updates(self) -> None:
        def before(optimizer: Optimizer, *_: Any) -> None:
            self._depth += 1
            if self._depth == 1:  # not that of an optimizer that another one calls, as ZeRO's
                self._note_update(optimizer)

        def after(*_: Any) -> None:
            self._depth -= 1

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def _note_update(self, optimizer: Optimizer) -> None:
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)
        number = [optimizer is other for other in self.optimizers].index(True)
        for i, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, (int, float)) or isinstance(value, Tensor) and value.numel() == 1:
                    self.rates[f"{name} {number} {i} {self._updates}"] = float(value)
            for p in group["params"]:
                if p.grad is not None and not hasattr(p, "placements"):
                    self.grads.setdefault(p, []).append(array_of(p.grad))
        self._updates += 1

    def _watch_precision(self) -> None:
        enter = torch.autocast.__enter__

        def noted(autocast: Any) -> Any:
            self.note_precision(autocast.fast_dtype if autocast._enabled else None)
            return enter(autocast)

        torch.autocast.__enter__ = noted

    def note_precision(self, dtype: Any) -> None:
        if dtype in LOW and self.low != "bfloat16":
            self.low = LOW[dtype]

    def _watch_works(self) -> None:
        for name in (*COLLECTIVES, *SENDS, "batch_isend_irecv"):
            setattr(dist, name, self._watched(getattr(dist, name)))
        for name in SENDS:  # P2POp takes only the functions of this module
            setattr(dist.distributed_c10d, name, getattr(dist, name))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            result, caller = function(*args, **options), sys._getframe(1)
            if not is_users(caller.f_code.co_filename):
                return result
            if self._depth:  # the optimizer itself sums gradients: it does not use those that were noted
                self.grads.clear()
            if result is None:
                return result
            works = [Work(work, caller.f_lineno) for work in (result if isinstance(result, list) else [result])]
            self._works += works
            return works if isinstance(result, list) else works[0]

        return call

    def refuse_unfinished(self) -> None:
        """Raises RuntimeError if the step has not waited for what it has begun."""
        for work in self._works:
            if not work.is_awaited:
                advice = "does not wait(); wait before the update"
                raise RuntimeError(f"line {work.line} begins an asynchronous operation and {advice}")
        self._works.clear()

    def _watch_limits(self, clips: bool) -> None:
        """Note whether gradients are clipped and updates are skipped."""

        def note(name: str, is_reached: bool) -> None:
            key = f"the limit of {name} in line {users_line()}"
            self.limits[key] = self.limits.get(key, False) or is_reached

        def by_norm(clip: Any, parameters: Any, max_norm: float, total_norm: Tensor, foreach: Any = None) -> None:
            note("clip_grad_norm_", not float(total_norm) <= max_norm)
            if clips:
                clip(parameters, max_norm, total_norm, foreach)

        def by_value(clip: Any, parameters: Any, clip_value: float, foreach: Any = None) -> None:
            parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
            largest = [float(p.grad.abs().max()) for p in parameters if p.grad is not None and p.grad.numel()]
            note("clip_grad_value_", not max(largest, default=0) <= clip_value)
            if clips:
                clip(parameters, clip_value, foreach)

        def step(update: Any, scaler: Any, optimizer: Any, state: Any, *args: Any, **options: Any) -> Any:
            note("a scaler that skips steps", any(float(x) for x in state["found_inf_per_device"].values()))
            return update(scaler, optimizer, state, *args, **options)

        for function, places in (
            (by_norm, [(clip_grad, "_clip_grads_with_norm_"), (nn.utils, "clip_grads_with_norm_")]),
            (by_value, [(clip_grad, "clip_grad_value_"), (nn.utils, "clip_grad_value_")]),
            (step, [(torch.amp.GradScaler, "_maybe_opt_step")]),
        ):
            self._replace(places, function)

    def _replace(self, places: Sequence[tuple[Any, str]], function: Callable[..., Any]) -> None:
        """Let a function get the calls of another one, which has a name in each place, and that one as its first
        argument."""
        place, name = places[0]
        original = getattr(place, name, None)
        if original is None:
            self.unseen.append(f"without seeing what {name} limits, which PyTorch {torch.__version__} lacks")
            return

        @functools.wraps(original)
        def call(*args: Any, **options: Any) -> Any:
            return function(original, *args, **options)

        for place, name in places:
            setattr(place, name, call)


class Work:
    """An asynchronous operation of the user, and whether somebody has waited for it.

    It is never complete when it is asked for the first time: a step must not count on it.
    """

    def __init__(self, work: Any, line: int) -> None:
        self.work, self.line, self.is_awaited, self.is_asked = work, line, False, False

    def is_completed(self) -> bool:
        if self.is_asked and self.work.is_completed():
            self.is_awaited = True
        self.is_asked = True
        return self.is_awaited

    def __getattr__(self, name: str) -> Any:
        if name != "is_success":
            self.is_awaited = True
        return getattr(self.work, name)
