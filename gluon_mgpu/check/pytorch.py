"""Takes the steps of PyTorch code in several processes over gloo and in one, each time with a fresh copy of the code.

`compare_file` is for `gluon-mgpu check FILE.py`; `parallel` takes three functions instead. Each side is a group of
processes, forks of this one. They exchange only what the step does; what they find goes to this one by pipes.
"""

from __future__ import annotations

import io
import os
import random as python_random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
import torch._dynamo  # TorchDispatchMode needs it; it takes seconds, and each process would import it
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.parallel
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import gluon_mgpu.check.processes as processes
from gluon_mgpu.check.accuracy import of_file
from gluon_mgpu.check.judge import Arrays, Claim, Driver, Report, Session, Shards, Step, compare
from gluon_mgpu.check.processes import Outcome, Send
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.support.programs import execute

LR = 0.1
PREFIX = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod)\.")  # of DDP and torch.compile in parameters' names
COLLECTIVES = "all_reduce broadcast reduce all_gather all_gather_into_tensor reduce_scatter_tensor".split()
LOW = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
DRAWS = {"rand", "randn", "normal", "rand_like", "randn_like"}


def parallel(
    make: Callable[[int, int], Any],
    step: Callable[[Any, Any], Any],
    batch: Callable[[int, int], Any],
    processes: Sequence[int] = (2, 3),
    steps: int = 3,
    even: bool = False,
    random: str = "off",
    reference: Callable[[Any, Any], Any] | None = None,
    divide: str = "contiguous",
    seconds: float = 60,
) -> Report:
    """Compare training steps in several processes with the same steps in one.

    make(rank, world): returns what a step needs: a network, an optimizer, a schedule, or any nest of these; called in
    each process, after dist.init_process_group. step(state, part): the body of the training loop. batch(i, n): batch i,
    of n examples: a nest of tensors, with the examples along the first axis. processes: how many to compare. steps: how
    many one after the other, before one with an uneven batch. even: uneven batches may differ; then there is a warning.
    random: "off" switches dropout modules off; "on" leaves them, and a step that draws cannot be compared.
    reference(state, batch): the step in one process, if it is another. divide: how a process gets its part:
    "contiguous", "strided" as by DistributedSampler, or "none" if the step itself divides. seconds: the limit of a
    step.
    """
    driver = PyTorch(make, step, batch, random == "off", reference, divide, seconds)
    return compare(driver, processes, steps, even)


def compare_file(path: str, processes: Sequence[int], steps: int, even: bool, seconds: float) -> Report:
    """Compare the steps of a file with `train_batch` and `init_net` or `init_params`."""
    file = os.path.realpath(path)
    sys.path.insert(0, str(Path(file).parent))  # as for a script, but its modules hide none that are imported above
    return compare(PyTorchFile(file, seconds), processes, steps, even)


@dataclass
class PyTorch(Driver):
    """The driver. See `parallel` for the arguments."""

    make: Callable[[int, int], Any]
    take_step: Callable[[Any, Any], Any]
    draw: Callable[[int, int], Any]
    no_dropout: bool
    reference: Callable[[Any, Any], Any] | None
    divide: str
    seconds: float
    unit = "process"
    advice = {
        "not summed": "sum them in place, before the update (in DDP, in the last backward pass)",
        "replicas": "sum all gradients before the update, as DDP does in a backward pass that is not in no_sync",
        "statistics": "average or broadcast them, as DDP does",
        "left": "call zero_grad after each update",
    }

    def batch(self, i: int, n: int) -> Any:
        seed_all(i)
        return self.draw(i, n)

    def take(self, batch: Any, examples: Sequence[int]) -> Any:
        index = torch.tensor([*examples])
        return pytree.tree_map(lambda a: a[index] if isinstance(a, Tensor) and a.ndim else a, batch)

    def split(self, k: int, batch: Any, n: int) -> Shards | None:
        if self.divide != "none":
            return divided(self.divide, k, n)
        if self.reference:  # the processes of a tensor group share examples
            return None
        sessions = [self.run(count, [batch], probe=True) for count in (k, 1)]
        if not all(session.steps for session in sessions):
            return None
        examples, [used] = (session.steps[0].examples for session in sessions)
        return examples if all(examples) and used == [*range(n)] else None  # a mask leaves no gradient of some

    def run(self, k: int, batches: Sequence[Any], **options: Any) -> Session:
        outcome = self._group(k, self._process, batches, **options)
        session = Session(failure=outcome.failure, late=outcome.late)
        for i, messages in enumerate(outcome.stages):
            facts, arrays, *others = (list(values) for values in zip(*messages))
            session.facts |= {name: value for name, value in facts[0].items() if value or name not in session.facts}
            if i:
                session.steps.append(Step(arrays, *others))
            else:
                session.start = arrays
        return session

    def _group(self, world: int, function: Callable[..., None], *args: Any, **options: Any) -> Outcome:
        """Call function(send, rank, world, *args, **options) in connected processes."""
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def process(rank: int, send: Send) -> None:
            join(rank, world, store.port, self.seconds / 2)
            seed_all(rank)
            function(send, rank, world, *args, **options)

        return processes.run([partial(process, rank) for rank in range(world)], self.seconds)

    def _process(
        self,
        send: Send,
        rank: int,
        world: int,
        batches: Sequence[Any],
        *,
        double: bool = False,
        shards: Sequence[Shards] | None = None,
        seed: int = 0,
        clear: bool = False,
        probe: bool = False,
    ) -> None:
        """What each process does. probe: find the examples whose gradients a step computes."""
        watch, take_step = Watch(), self.reference if world == 1 and self.reference else self.take_step
        if double or world == 1:
            _compile_nothing()
        with Float64(watch) if double else nullcontext():
            state = self.make(rank, world)
            modules = [m for _, value in walk(state) if isinstance(value, nn.Module) for m in value.modules()]
            facts: dict[str, Any] = {"how": ["with dropout off"] * (self.no_dropout and switch_dropout_off(modules))}
            normalized = [m for m in modules if isinstance(m, BatchNorm) and m.training]
            normalized = [] if self.reference else [m for m in normalized if not isinstance(m, nn.SyncBatchNorm)]
            buffers = {id(b) for m in normalized for b in m.buffers()}
            facts |= {"normalized": bool(normalized)}
            facts["statistics"] = [name for name, a in named(state).items() if id(a) in buffers]
            facts["synced"] = any(getattr(m, "broadcast_buffers", False) for m in modules)
            is_divided = any(hasattr(p, "placements") for p in named(state).values())
            if is_divided and not self.reference and not any(hasattr(m, "unshard") for m in modules):  # by FSDP
                facts["reason"] = (
                    "its parameters are divided by tensor parallelism, and only data parallelism is checked; pass "
                    "reference="
                )
            now = read(state)
            send((facts, now))
            seed_all(1000 * seed + rank)
            for i, batch in enumerate(batches):
                if shards and world == 1:
                    by_shard(normalized, shards[i])
                data = pytree.tree_map(lambda a: copied(a, double, probe), batch)
                leaves = [a for a in pytree.tree_leaves(data) if isinstance(a, Tensor)]
                part = data
                if world > 1 and self.divide != "none":
                    part = self.take(data, divided(self.divide, world, len(leaves[0]))[rank])
                watch.grads.clear()
                losses = take_step(state, part)
                if world > 1:
                    watch.refuse_unfinished()
                after = {**now, **read(state)}
                params, changes = named(state), {name: after[name] - a for name, a in now.items()}
                losses = [a.detach().double().numpy() for a in pytree.tree_leaves(losses) if isinstance(a, Tensor)]
                moved = any(a.any() for a in changes.values())
                left = [p for p in params.values() if moved and p.grad is not None and p.grad.any()]
                facts = {"low": watch.low, "left": bool(left)}
                grads = {name: watch.grads[p] for name, p in params.items() if p in watch.grads}
                examples = examples_of(leaves) if probe else []
                send((facts, changes, grads, losses[0].ravel() if len(losses) == 1 else np.zeros(0), examples))
                if clear:
                    for p in left:
                        p.grad = torch.zeros_like(p.grad)
                now = {name: after[name] for name in now}  # without arrays that the step has created


class PyTorchFile(PyTorch):
    """A file, which each process executes again. Its step gets whole batches, and divides them."""

    def __init__(self, file: str, seconds: float) -> None:
        super().__init__(self._make, self._step, self._draw, True, None, "none", seconds)
        self.file, self.text = file, Path(file).read_text(errors="replace")

    def _make(self, rank: int, world: int) -> Any:
        self.module = execute("step", self.file)
        if hasattr(self.module, "init_net"):
            return self.module.init_net(LR)
        return {"params": self.module.init_params()}

    def _step(self, state: Any, batch: Any) -> Any:
        more = (state["params"], LR) if isinstance(state, dict) and "params" in state else state
        return self.module.train_batch(*(batch if isinstance(batch, (list, tuple)) else [batch]), *more)

    def _draw(self, i: int, n: int) -> Any:
        """The file's own `example_batch(n)`, or images."""
        if "def example_batch" not in self.text:
            X, y = Driver.batch(self, i, n)
            return torch.tensor(X), torch.tensor(y, dtype=torch.int64)

        def draw(send: Send) -> None:
            torch.set_num_threads(1)
            data = io.BytesIO()
            module = execute("step", self.file)
            seed_all(i)
            torch.save(module.example_batch(n), data)
            send(data.getvalue())

        outcome = processes.run([draw], self.seconds)
        if outcome.failure:
            raise UsageError(None, self.file, f"example_batch fails: {outcome.failure}")
        return torch.load(io.BytesIO(outcome.stages[0][0]), weights_only=True)

    def checks(self, k: int, is_wrong: bool) -> Iterator[Claim]:
        if is_wrong or "def evaluate_accuracy" not in self.text:
            return

        def evaluate(send: Send, rank: int, world: int) -> None:
            state = self._make(rank, world)
            model = state["params"] if isinstance(state, dict) else state[0]
            net = model.eval() if isinstance(model, nn.Module) else None
            X = torch.tensor(Driver.batch(self, 0, 11)[0])
            send(of_file(self.module, X, torch.tensor, model, net))

        outcome = self._group(k, evaluate)
        failure = f"evaluate_accuracy fails: {outcome.failure}"
        yield "accuracy", outcome.stages[0][0] if outcome.stages else failure


def join(rank: int, world: int, port: int, seconds: float) -> None:
    """Connect the processes, with torchrun's environment variables. seconds: how long one may wait for others."""
    torch.set_num_threads(1)
    variables: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    variables |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "check"}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))


def seed_all(number: int) -> None:
    """Seed all generators: with the rank, so that only what is sent, or drawn with a seed of its own, is equal."""
    torch.manual_seed(number)
    np.random.seed(number)
    python_random.seed(number)


def divided(how: str, k: int, n: int) -> list[list[int]]:
    """The examples of each process."""
    return [[*range(n)][r::k] if how == "strided" else np.array_split(range(n), k)[r].tolist() for r in range(k)]


def copied(value: Any, double: bool, requires_grad: bool) -> Any:
    """A side's own copy of a tensor of a batch."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
        if value.is_floating_point():
            return (value.double() if double else value).requires_grad_(requires_grad)
    return value


# What a step changes


def walk(value: Any, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """The tensors, networks and optimizers in a nest, each once, with their names."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (Tensor, nn.Module, Optimizer)):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, f"{name}.{key}" if name else str(key), seen)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from walk(item, f"{name}[{i}]", seen)
    elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in ("torch", "builtins", "numpy"):
        yield from walk(vars(value), name, seen)


def named(state: Any) -> dict[str, Tensor]:
    """The parameters and other floating-point tensors of a state, by name. If there is a network, what only an
    optimizer has is left out: it may be a part of the parameters, a different one in each process."""
    tensors: dict[str, Tensor] = {}
    has_network = any(isinstance(value, nn.Module) and [*value.parameters()] for _, value in walk(state))
    for name, value in walk(state):
        if isinstance(value, nn.Module):
            found = {PREFIX.sub("", n): a for n, a in [*value.named_parameters(), *value.named_buffers()]}
        elif isinstance(value, Optimizer):
            if has_network:
                continue
            params = [p for group in value.param_groups for p in group["params"]]
            found = {f"{name}.{i}": p for i, p in enumerate(params)}
        else:
            found = {name: value}
        for n, a in found.items():
            if a.is_floating_point() and not any(a is other for other in tensors.values()):
                tensors[n if n not in tensors else f"{name}.{n}"] = a
    return tensors


def read(state: Any) -> Arrays:
    """Copies of all arrays in float64, with those that are divided among the processes gathered."""
    gathered = {n: a.full_tensor() if hasattr(a, "full_tensor") else a for n, a in named(state).items()}
    return {name: a.detach().to(torch.float64).numpy().copy() for name, a in gathered.items()}


def examples_of(leaves: Sequence[Tensor]) -> list[int]:
    """The examples of which a step has computed gradients."""
    grads = [a.grad.flatten(1).abs().sum(1) if a.ndim > 1 else a.grad.abs() for a in leaves if a.grad is not None]
    return sum(grads).nonzero().ravel().tolist() if grads else []


# Batch normalization, dropout, precision


def by_shard(modules: Sequence[nn.Module], shards: Shards) -> None:
    """Let batch normalization see one shard after the other."""
    n = sum(map(len, shards))
    order = np.concatenate([np.asarray(shard, int) for shard in shards])
    for module in modules:

        def forward(x: Tensor, module: nn.Module = module) -> Tensor:
            if not module.training:
                return type(module).forward(module, x)
            if len(x) % n:
                raise ValueError(f"batch normalization gets {len(x)} rows of a batch of {n}")
            each = np.arange(len(x)).reshape(n, -1)  # the rows of each example
            parts = [type(module).forward(module, x[each[np.asarray(shard, int)].ravel()]) for shard in shards]
            return torch.cat(parts)[np.argsort(each[order].ravel())]

        module.forward = forward


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


def _compile_nothing() -> None:
    """Let torch.compile return what it gets: the reference needs no compiler."""
    torch.compiler.set_stance("force_eager")
    torch.compile = lambda model=None, **_: model if model is not None else (lambda function: function)


class Watch:
    """What a process sees of its steps. grads: {parameter: gradient} when the optimizer updates. low: the lowest
    precision."""

    def __init__(self) -> None:
        self.grads: dict[Tensor, np.ndarray] = {}
        self.low = "float32"
        self.works: list[tuple[Mock, int]] = []  # asynchronous operations, and the lines that begin them
        register_optimizer_step_pre_hook(self._before_update)
        for name in COLLECTIVES:
            setattr(dist, name, self._watched(getattr(dist, name)))

    def _before_update(self, optimizer: Optimizer, *_: Any) -> None:
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            if p.grad is not None and not hasattr(p, "placements") and not p.grad.is_sparse:
                self.grads[p] = p.grad.detach().double().numpy().copy()

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            work, caller = function(*args, **options), sys._getframe(1)
            if work is not None and processes.is_users(caller.f_code.co_filename):
                work = Mock(wraps=work)
                self.works.append((work, caller.f_lineno))
            return work

        return call

    def refuse_unfinished(self) -> None:
        for work, line in self.works:
            if not work.mock_calls:
                advice = "does not wait(); wait before the update"
                raise RuntimeError(f"line {line} begins a sum with async_op=True and {advice}")


class Float64(TorchDispatchMode):
    """Computes in float64 what the code computes in any other precision. Random numbers are drawn in float32, so that
    they are the same."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        torch.set_default_dtype(torch.float64)  # which autocast leaves as it is
        for name in ("from_numpy", "tensor", "as_tensor"):
            setattr(torch, name, self._converted(getattr(torch, name)))
        enter = torch.autocast.__enter__

        def noted(autocast: Any) -> Any:
            self._note(autocast.fast_dtype if autocast._enabled else None)
            return enter(autocast)

        torch.autocast.__enter__ = noted

    def _note(self, dtype: Any) -> None:
        if dtype in LOW and self.watch.low != "bfloat16":
            self.watch.low = LOW[dtype]

    def _converted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def convert(*args: Any, **options: Any) -> Tensor:
            tensor = function(*args, **options)
            self._note(tensor.dtype)
            return tensor.double() if tensor.is_floating_point() and tensor.ndim else tensor

        return convert

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # the operations on its parts come here, too
        kwargs, dtype = kwargs or {}, (kwargs or {}).get("dtype")
        first: Any = args[0] if args else None
        shape = first.shape if isinstance(first, Tensor) else first
        if dtype is not None and dtype.is_floating_point:
            self._note(dtype)
            # but not a number, such as the factor of a gradient scaler, which has kernels for float32 only
            if shape or isinstance(first, Tensor) and first.dtype == torch.float64:
                kwargs = {**kwargs, "dtype": torch.float64}
        if torch.Tag.nondeterministic_seeded in func.tags and dtype != torch.float64:
            name = func.overloadpacket.__name__
            if name.endswith("_") and first.dtype == torch.float64:
                return first.copy_(func(torch.empty(first.shape, dtype=torch.float32), *args[1:], **kwargs))
            if name in DRAWS and "dtype" in str(func._schema):
                return func(*args, **{**kwargs, "dtype": torch.float32}).double()
        return func(*args, **kwargs)
