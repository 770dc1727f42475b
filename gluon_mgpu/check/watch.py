"""What a process sees of the steps that it takes in PyTorch, and what it changes in them: precision, limits, dropout,
and what batch normalization sees at a time."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.parallel
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import gluon_mgpu.check.processes as processes
from gluon_mgpu.check.driver import Shards
from gluon_mgpu.check.state import array_of

COLLECTIVES = (
    "all_reduce broadcast reduce all_gather all_gather_into_tensor reduce_scatter_tensor gather scatter all_to_all "
    "all_to_all_single reduce_scatter"
).split()
SENDS = "isend irecv".split()
NO_WAIT = {"is_completed", "is_success"}  # what one can ask without waiting
LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
DOUBLE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
DRAWS = {"rand", "randn", "normal", "rand_like", "randn_like"}
SIGNATURE = 8  # numbers that stand for a row


class Watch:
    """What a process sees of its steps. grads: {parameter: the gradient at each step of an optimizer}. rates: the
    optimizers' settings at these steps. low: the lowest precision. limits: {what was clipped or skipped, and where:
    whether it was}. factor: of the gradients. clips: whether gradients are clipped."""

    def __init__(self, factor: float = 1, clips: bool = True) -> None:
        self.grads: dict[Tensor, list[np.ndarray]] = {}
        self.updates = 0
        self.rates: dict[str, float] = {}
        self.optimizers: list[Optimizer] = []
        self.low, self.limits = "float32", dict[str, bool]()
        self.works: list[tuple[Mock, int]] = []  # asynchronous operations, and the lines that begin them
        self.depth = 0
        register_optimizer_step_pre_hook(self._before_update)
        register_optimizer_step_post_hook(self._after_update)
        for name in [*COLLECTIVES, *SENDS]:
            setattr(dist, name, self._watched(getattr(dist, name)))
        for name in SENDS:  # P2POp takes only the functions of this module
            setattr(dist.distributed_c10d, name, getattr(dist, name))
        enter = torch.autocast.__enter__

        def noted(autocast: Any) -> Any:
            self.note(autocast.fast_dtype if autocast._enabled else None)
            return enter(autocast)

        torch.autocast.__enter__ = noted
        self._watch_limits(clips)
        if factor != 1:
            backward = torch.autograd.backward

            def scaled(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
                tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
                grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(tensors)
                grads = [(torch.ones_like(t) if g is None else g) * factor for t, g in zip(tensors, grads)]
                backward(tensors, grads, *args, **options)

            torch.autograd.backward = scaled

    def clear(self) -> None:
        """Forget the step before."""
        self.grads.clear()
        self.rates.clear()
        self.updates = self.depth = 0

    def note(self, dtype: Any) -> None:
        if dtype in LOW and self.low != "bfloat16":
            self.low = LOW[dtype]

    def _after_update(self, *_: Any) -> None:
        self.depth -= 1

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        self.depth += 1
        if self.depth > 1:  # of an optimizer that calls another one, as ZeRO's
            return
        if not any(optimizer is other for other in self.optimizers):
            self.optimizers.append(optimizer)
        number = [optimizer is other for other in self.optimizers].index(True)
        for i, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if isinstance(value, (int, float)) or isinstance(value, Tensor) and value.numel() == 1:
                    self.rates[f"{name} {number} {i} {self.updates}"] = float(value)
            for p in group["params"]:
                if p.grad is not None and not hasattr(p, "placements"):
                    self.grads.setdefault(p, []).append(array_of(p.grad))
        self.updates += 1

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            work, caller = function(*args, **options), sys._getframe(1)
            if work is not None and processes.is_users(caller.f_code.co_filename):
                work = Mock(wraps=work)
                self.works.append((work, caller.f_lineno))
            return work

        return call

    def refuse_unfinished(self) -> None:
        for work, line in self.works:
            if {name for name, *_ in work.mock_calls} <= NO_WAIT:
                advice = "does not wait(); wait before the update"
                raise RuntimeError(f"line {line} begins an asynchronous operation and {advice}")

    def _watch_limits(self, clips: bool) -> None:
        """Note whether gradients are clipped and updates are skipped."""

        def noted(name: str, is_reached: bool) -> None:
            key = f"the limit of {name} in line {processes.users_line()}"
            self.limits[key] = self.limits.get(key, False) or is_reached

        clip = getattr(clip_grad, "_clip_grads_with_norm_", None)
        clip_value, skip = clip_grad.clip_grad_value_, getattr(torch.amp.GradScaler, "_maybe_opt_step", None)

        def by_norm(params: Any, max_norm: float, total: Tensor, *args: Any, **options: Any) -> Any:
            noted("clip_grad_norm_", not float(total) <= max_norm)
            return clip(params, max_norm, total, *args, **options) if clip and clips else None

        def by_value(params: Any, limit: float, *args: Any, **options: Any) -> Any:
            params = [params] if isinstance(params, Tensor) else [*params]
            largest = [float(p.grad.abs().max()) for p in params if p.grad is not None and p.grad.numel()]
            noted("clip_grad_value_", not max(largest, default=0) <= limit)
            return clip_value(params, limit, *args, **options) if clips else None

        def step(scaler: Any, optimizer: Any, state: Any, *args: Any, **options: Any) -> Any:
            noted("a scaler that skips steps", any(float(x) for x in state["found_inf_per_device"].values()))
            return skip and skip(scaler, optimizer, state, *args, **options)

        if clip:
            clip_grad._clip_grads_with_norm_ = by_norm
        clip_grad.clip_grad_value_ = nn.utils.clip_grad_value_ = by_value
        if skip:
            torch.amp.GradScaler._maybe_opt_step = step


# Float64


class Float64(TorchDispatchMode):
    """Computes in float64 what the code computes in any other precision. Random numbers are drawn in float32, so that
    they are the same."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        names = ("from_numpy", "tensor", "as_tensor")
        self.converting = {name: self._converted(getattr(torch, name)) for name in names}

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)  # which autocast leaves as it is
        self.originals = {name: getattr(torch, name) for name in self.converting}
        for name, function in self.converting.items():
            setattr(torch, name, function)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(torch.float32)
        for name, function in self.originals.items():
            setattr(torch, name, function)

    def _converted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def convert(*args: Any, **options: Any) -> Tensor:
            tensor = function(*args, **options)
            self.watch.note(tensor.dtype)
            if tensor.is_complex():
                return tensor.to(torch.complex128)
            return tensor.double() if tensor.is_floating_point() and tensor.ndim else tensor

        return convert

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # the operations on its parts come here, too
        kwargs, dtype = kwargs or {}, (kwargs or {}).get("dtype")
        first: Any = args[0] if args else None
        shape = first.shape if isinstance(first, Tensor) else first
        name = func.overloadpacket.__name__
        if dtype in DOUBLE:
            kwargs = {**kwargs, "dtype": DOUBLE[dtype]}
        elif dtype is not None and dtype.is_floating_point:
            self.watch.note(dtype)
            # but not a number, such as the factor of a gradient scaler, which has kernels for float32 only
            if shape or isinstance(first, Tensor) and first.dtype == torch.float64:
                kwargs = {**kwargs, "dtype": torch.float64}
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            args = (*args[:2], args[2].to(torch.float32))
        if torch.Tag.nondeterministic_seeded in func.tags and dtype not in (torch.float64, torch.complex128):
            if name.endswith("_") and first.dtype == torch.float64:
                return first.copy_(func(torch.empty(first.shape, dtype=torch.float32), *args[1:], **kwargs))
            if name in DRAWS and "dtype" in str(func._schema):
                drawn, wide = (torch.complex64, torch.complex128) if dtype in DOUBLE else (torch.float32, torch.float64)
                return func(*args, **{**kwargs, "dtype": drawn}).to(wide)
        return func(*args, **kwargs)


class Compiler(ModuleType):
    """Stands in for torch._dynamo, which takes seconds to import, until something is compiled. DDP, optimizers and
    process groups use a few functions of it in any case."""

    KNOWN = {
        "torch._dynamo.disable": lambda function=None, *_, **options: function or (lambda function: function),
        "torch._dynamo.graph_break": lambda *_, **options: None,
        "torch._dynamo.trace_rules": Mock(),
        "torch._dynamo.utils.get_optimize_ddp_mode": lambda: "ddp_optimizer",
    }

    @classmethod
    def stand_in(cls) -> None:
        if "torch._dynamo" not in sys.modules:
            torch._dynamo = sys.modules["torch._dynamo"] = cls("torch._dynamo")

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if path in self.KNOWN:
            return self.KNOWN[path]
        if any(known.startswith(f"{path}.") for known in self.KNOWN):
            return Compiler(path)
        if isinstance(sys.modules["torch._dynamo"], Compiler):
            del sys.modules["torch._dynamo"], torch._dynamo
        return getattr(importlib.import_module(self.__name__), name)


def compile_nothing() -> None:
    """Let torch.compile return what it gets: the reference needs no compiler."""
    if not isinstance(sys.modules.get("torch._dynamo"), Compiler):
        torch.compiler.set_stance("force_eager")
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)


def switch_dropout_off(modules: Sequence[nn.Module]) -> bool:
    """Returns whether there was any."""
    found = False
    for module in modules:
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        rate = getattr(module, name, None)
        if isinstance(rate, float) and rate > 0:
            setattr(module, name, 0.0)
            found = True
    return found


# Rows: one for each example, or several


def signatures(x: Any) -> np.ndarray:
    """A few numbers for each row of a tensor, by which it is found again."""
    rows = array_of(x).reshape(len(x), -1)
    return rows @ _projection(rows.shape[1])


@functools.lru_cache(maxsize=64)
def _projection(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(n, SIGNATURE))


def found_again(rows: np.ndarray, among: np.ndarray, tolerance: float) -> np.ndarray:
    """The index of each row among others, each used once; -1: there is none."""
    scale, used = tolerance * (np.abs(among).max(initial=0) + 1e-300), np.zeros(len(among), bool)
    found = np.full(len(rows), -1)
    for i, row in enumerate(rows):
        apart = np.abs(among - row).max(axis=1) if len(among) else np.zeros(0)
        apart[used] = math.inf
        if len(apart) and apart[best := int(apart.argmin())] <= scale:
            found[i], used[best] = best, True
    return found


class Normalization:
    """Batch normalization of several processes: `calls` are the rows that each module got in a step. In one process, it
    gets the rows of one process after the other. rows: those calls of each process; unknown: the examples' shards, and
    the rows of an example are neighbours."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules, self.calls = modules, list[tuple[int, np.ndarray]]()
        self.rows: Sequence[Any] = ()
        self.shards: Shards = ()
        for i, module in enumerate(modules):
            module.forward = functools.partial(self._forward, i)

    def start(self, rows: Sequence[Any] = (), shards: Shards = ()) -> None:
        """Begin a step."""
        self.calls, self.rows, self.shards = [], rows, shards

    def _forward(self, i: int, x: Tensor) -> Tensor:
        module = self.modules[i]
        forward = functools.partial(type(module).forward, module)
        if not module.training:
            return forward(x)
        self.calls.append((i, signatures(x)))
        if not self.shards:
            return forward(x)
        parts = self._parts(x.dtype == torch.float64) or self._neighbours(len(x))
        outputs = [forward(x[part]) for part in parts]
        return torch.cat(outputs)[np.argsort(np.concatenate(parts))]

    def _parts(self, double: bool) -> list[np.ndarray]:
        """The rows of each process in the order in which it had them; empty if they are not found."""
        i, rows = self.calls[-1]
        number = len(self.calls) - 1
        calls = [calls[number] for calls in self.rows if len(calls) > number]
        if not calls or len(calls) < len(self.rows) or any(call[0] != i for call in calls):
            return []
        if sum(len(found) for _, found in calls) != len(rows) or len(rows) > 5000:
            return []
        index = found_again(np.concatenate([found for _, found in calls]), rows, 1e-8 if double else 1e-4)
        return [] if (index < 0).any() else np.split(index, np.cumsum([len(found) for _, found in calls])[:-1])

    def _neighbours(self, rows: int) -> list[np.ndarray]:
        n = sum(map(len, self.shards))
        if rows % n:
            raise ValueError(f"batch normalization gets {rows} rows of a batch of {n}")
        each = np.arange(rows).reshape(n, -1)  # the rows of each example
        return [each[np.asarray(shard, int)].ravel() for shard in self.shards]


# Where a difference begins


@contextmanager
def traced_modules(modules: dict[str, nn.Module], events: list[dict[str, Any]]) -> Iterator[None]:
    """Note the rows of the input and the output of each module, and of the gradients of the output, as they come."""

    def noted(name: str, module: Any, inputs: Any, output: Any) -> None:
        tensor, given = _first(output), _first(inputs)
        if tensor is None or not tensor.ndim:
            return
        number, rows = len(events), signatures(tensor.detach())
        has_rows = given is not None and given.ndim
        events.append({"name": name, "output": rows, "input": signatures(given.detach()) if has_rows else None})
        if tensor.requires_grad:
            tensor.register_hook(
                lambda grad: events.append({"name": name, "of": number, "grad": signatures(grad.detach())})
            )

    hooks = [m.register_forward_hook(functools.partial(noted, name)) for name, m in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _first(value: Any) -> Any:
    """The first tensor of a module's inputs or outputs."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and not hasattr(value, "placements") else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in map(_first, items) if found is not None), None)


def beginning(several: Sequence[Sequence[dict[str, Any]]], one: Sequence[dict[str, Any]]) -> str:
    """The first module whose output for an example is not that on one process, or whose output's gradient is not. Both
    sides are in float64, and have the same events in the same order."""
    for number, events in enumerate(several):
        rows, factor = dict[int, np.ndarray](), None
        for i, (mine, its) in enumerate(zip(events, one)):
            if mine["name"] != its["name"] or ("grad" in mine) != ("grad" in its):
                return ""
            if "grad" not in mine:
                factor = None  # of another backward pass
                rows[i] = found_again(mine["output"], its["output"], 1e-8)
                if (rows[i] < 0).any():
                    given, others = mine["input"], its["input"]
                    same = given is not None and others is not None and (found_again(given, others, 1e-8) >= 0).all()
                    what = "the same input, another output" if same else "no example on one process has its input"
                    return f"; it differs first in `{mine['name']}` ({what}, on process {number})"
                continue
            grad, expected = mine["grad"], its["grad"][rows[mine["of"]]]
            if factor is None and expected.any():
                factor = float((grad * expected).sum() / (expected * expected).sum())
            if factor is not None and np.abs(grad - factor * expected).max() > 1e-6 * np.abs(factor * expected).max():
                name = mine["name"]
                return f"; it differs first in the gradient of the output of `{name}` (on process {number})"
    return ""
