"""Takes the steps of PyTorch code in several processes over gloo and in one, each time with a fresh copy of the code.

`compare_file` is for `gluon-mgpu check FILE.py`; `parallel` takes three functions instead. Each side is a group of
processes, forks of this one. They exchange only what the step does; what they find goes to this one by pipes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import random as python_random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.parallel
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase

import gluon_mgpu.check.processes as processes
import gluon_mgpu.check.reached as reached
import gluon_mgpu.check.watch as watch
from gluon_mgpu.check.accuracy import of_file
from gluon_mgpu.check.driver import AS_WRITTEN, Arrays, Claim, Driver, Facts, Options, Session, Shards, StepResult
from gluon_mgpu.check.judge import Report, compare
from gluon_mgpu.check.processes import Outcome, Send
from gluon_mgpu.check.state import State, array_of, leaves, rows_of, taken
from gluon_mgpu.check.watch import Float64, Normalization, Watch
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.support.programs import execute

LR = 0.1
_store: Any = None
NOT_CONNECTED = "the processes do not find each other"
STRESS = {  # what is tried if something was not reached
    "with larger gradients": Options(factor=1e4),
    "with larger inputs": Options(scale=100.0),
    "if one process gets numbers that are not finite": Options(factor=float("nan"), scale=float("nan")),
}


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
    of n examples: any nest of tensors, arrays and lists with one row per example. processes: how many to compare.
    steps: how many one after the other, before one with an uneven batch. even: uneven batches may differ; then there is
    a warning. random: "off" switches dropout modules off; "on" leaves them, and a step that draws cannot be compared.
    reference(state, batch): the step in one process, if it is another. divide: how a process gets its part:
    "contiguous", "strided" as by DistributedSampler, or "none" if the step itself divides. seconds: the limit of a
    step.
    """
    import_modules(["torch._dynamo"] * bool({"torch.distributed.fsdp", "torch.distributed.tensor"} & {*sys.modules}))
    driver = PyTorch(make, step, batch, random == "off", reference, divide, seconds)
    return compare(driver, processes, steps, even)


def compare_file(path: str, processes: Sequence[int], steps: int, even: bool, seconds: float) -> Report:
    """Compare the steps of a file with `train_batch` and `init_net` or `init_params`."""
    file = os.path.realpath(path)
    import_early(Path(file).read_bytes())
    sys.path.insert(0, str(Path(file).parent))  # as for a script, but its modules hide none that are imported above
    return compare(PyTorchFile(file, seconds), processes, steps, even)


def import_early(text: bytes) -> None:
    """Import the parts of PyTorch that a file needs, which each process would otherwise do; that takes seconds."""
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    words = (b"torch.compile", b"torch.func", b"vmap", b"fsdp", b"distributed.tensor")
    import_modules([*sorted(names), *["torch._dynamo"] * any(word in text for word in words)])


def import_modules(names: Iterable[str]) -> None:
    for name in names:
        if name.startswith("torch."):
            with suppress(ImportError):  # each process says so
                importlib.import_module(name)


@dataclass(frozen=True)
class Batch:
    """Batch i, of n examples, or some of its examples. Each process has its own copy of the data."""

    i: int
    n: int
    examples: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.n if self.examples is None else len(self.examples)


@dataclass
class PyTorch(Driver):
    """The driver. See `parallel` for the arguments. data: drawn batches. rows: what batch normalization got in several
    processes. done: what has run of the user's functions. limits: see `Watch`. sums: of the batches that were drawn."""

    make: Callable[[int, int], Any]
    take_step: Callable[[Any, Any], Any]
    draw: Callable[[int, int], Any]
    no_dropout: bool
    reference: Callable[[Any, Any], Any] | None
    divide: str
    seconds: float
    data: dict[Batch, Any] = field(default_factory=dict)
    rows: dict[Any, list[Any]] = field(default_factory=dict)
    done: reached.Done = field(default_factory=dict)
    limits: dict[str, bool] = field(default_factory=dict)
    sums: dict[Any, list[float]] = field(default_factory=dict)
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

    def batch(self, i: int, n: int) -> Any:
        seed_all(i)
        batch = Batch(i, n)
        self.data[batch] = self.draw(i, n)
        return batch

    def take(self, batch: Batch, examples: Sequence[int]) -> Batch:
        return replace(batch, examples=tuple((batch.examples or range(batch.n))[i] for i in examples))

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

    def run(
        self, k: int, batches: Sequence[Any], options: Options = AS_WRITTEN, probe: bool = False, trace: bool = False
    ) -> Session:
        """probe: find the examples whose gradients a step computes. trace: note each module's rows."""
        key = (*batches, options.double, repr(options.factor), repr(options.scale))
        rows = self.rows.get(key) if k == 1 and options.shards else None
        outcome = self._group(k, self._process, batches, options, rows, probe, trace)
        session, reason = Session(failure=outcome.failure, late=outcome.late), ""
        for i, messages in enumerate(outcome.stages):
            facts, notes, arrays, *others = (list(values) for values in zip(*messages))
            session.facts = facts[0]
            if i:
                session.steps.append(StepResult(arrays, *others))
                for done, limits in notes:
                    for code, here in done.items():
                        self.done.setdefault(code, set()).update(here)
                    for limit, is_reached in limits.items():
                        self.limits[limit] = self.limits.get(limit, False) or is_reached
                continue
            session.start = arrays
            for batch, sums in zip(batches, notes[0]):
                if not np.allclose(self.sums.setdefault((batch.i, batch.n), sums), sums, rtol=1e-3, equal_nan=True):
                    reason = "example_batch(n) draws other data each time; draw from a seed"
        session.facts.reason = session.facts.reason or reason
        if k > 1:
            self.rows[key] = [step.calls for step in session.steps]
        return session

    def clips(self) -> bool:
        return any(is_reached for limit, is_reached in self.limits.items() if "clip_grad" in limit)

    def missed(self) -> list[str]:
        limits = [limit for limit, is_reached in self.limits.items() if not is_reached]
        return reached.missed(self.done) + sorted(limits)

    def stress(self) -> dict[str, Options]:
        return STRESS

    def begins(self, k: int, batches: Sequence[Any], options: Options) -> str:
        sessions = [self.run(count, batches, options, trace=True) for count in (k, 1)]
        if not all(len(session.steps) == len(batches) for session in sessions):
            return ""
        several, [one] = (session.steps[-1].modules for session in sessions)
        return watch.beginning(several, one)

    def _group(self, world: int, function: Callable[..., None], *args: Any, **options: Any) -> Outcome:
        """Call function(send, rank, world, *args, **options) in connected processes. If they stall, try again."""

        def process(rank: int, send: Send) -> None:
            join(rank, world, ends, self.seconds / 2)
            seed_all(rank)
            function(send, rank, world, *args, **options)

        for _ in range(2):
            ends = os.pipe()  # for the port
            try:
                outcome = processes.run([partial(process, rank) for rank in range(world)], self.seconds)
            finally:
                for end in ends:
                    os.close(end)
            outcome.late = outcome.late or NOT_CONNECTED in outcome.failure
            if not outcome.late:
                break
        return outcome

    def _load(self) -> None:
        """What each process does before the batches are drawn."""

    def _drawn(self, batch: Batch) -> Any:
        return self.data[Batch(batch.i, batch.n)]

    def _process(
        self,
        send: Send,
        rank: int,
        world: int,
        batches: Sequence[Batch],
        options: Options,
        rows: Sequence[Any] | None,
        probe: bool,
        trace: bool,
    ) -> None:
        """What each process does. rows: what batch normalization got in each of several processes. See `run`."""
        double, shards, scale, factor = options.double, options.shards, options.scale, options.factor
        is_last = rank == world - 1
        is_stress = (factor, scale) != (1, 1)
        # it takes long, and the others run the same lines
        is_traced = is_stress or not (double or options.seed or trace)
        seen = Watch(factor if np.isfinite(factor) or is_last else 1, options.clips)
        take_step = self.reference if world == 1 and self.reference else self.take_step
        if double or world == 1:
            watch.compile_nothing()
        mode = Float64(seen) if double else nullcontext()
        with mode:
            self._load()
        drawn = {batch: self._drawn(batch) for batch in batches}
        seed_all(rank)
        with mode:
            given = self.make(rank, world)
            state = State.of(self._with_names(given), self._reaches())
            facts = Facts(how=["with dropout off"] * self._switch_dropout_off(state))
            normalized = [m for m in state.modules if isinstance(m, BatchNorm) and m.training]
            normalized = [] if self.reference else [m for m in normalized if not isinstance(m, nn.SyncBatchNorm)]
            facts.normalized = bool(normalized)
            with_statistics = [m for m in state.modules if isinstance(m, NormBase) and not self.reference]
            buffers = {id(b) for m in with_statistics if not isinstance(m, nn.SyncBatchNorm) for b in m.buffers()}
            synced = {id(b) for m in state.modules if getattr(m, "broadcast_buffers", False) for b in m.buffers()}
            facts.statistics = [name for name, a in state.tensors.items() if id(a) in buffers]
            facts.synced = [name for name, a in state.tensors.items() if id(a) in buffers & synced]
            facts.params = [name for name, a in state.tensors.items() if a.requires_grad]
            facts.soft = state.soft()
            facts.others = [*state.others, *facts.soft]
            is_divided = any(hasattr(p, "placements") for p in state.tensors.values())
            if is_divided and not self.reference and not any(hasattr(m, "unshard") for m in state.modules):  # by FSDP
                facts.reason = (
                    "its parameters are divided by tensor parallelism, and only data parallelism is checked; pass "
                    "reference="
                )
            soft, versions = state.read(), state.versions()
            now = {name: soft.pop(name) for name in [*soft] if name not in facts.soft}
            send((facts, [summary(drawn[batch]) for batch in batches], now))
            seed_all(1000 * options.seed + rank)
            normalization = Normalization(normalized) if normalized else None
            raw = self._watch_gradients(state) if world == 1 else {}
            for i, batch in enumerate(batches):
                of_all = scale if np.isfinite(scale) else 1
                change = partial(copied, double=double, requires_grad=probe, scale=of_all)
                data = taken(drawn[batch], batch.n, batch.examples, change)
                if not np.isfinite(scale):
                    spoil(data, len(batch), scale)
                part = data
                if world > 1 and self.divide != "none":
                    part = taken(data, len(batch), divided(self.divide, world, rows_of(data, len(batch)))[rank], same)
                seen.clear()
                raw.clear()
                if normalization:
                    is_reference = shards and world == 1
                    normalization.start(rows[i] if rows and len(rows) > i else (), shards[i] if is_reference else ())
                done, calls = reached.Done(), list[dict[str, Any]]()
                with ExitStack() as stack:
                    if trace:
                        stack.enter_context(watch.traced_modules(state.named_modules(), calls))
                    if is_traced:
                        stack.enter_context(reached.traced(done))
                    losses = take_step(given, part)
                if world > 1:
                    seen.refuse_unfinished()
                state = State.of(self._with_names(given), self._reaches())
                after = {**now, **state.read()}
                changes = {name: after[name] - a for name, a in now.items() if after[name].shape == a.shape}
                losses = [a.detach().double().numpy() for a in leaves(losses) if isinstance(a, Tensor)]
                moved = any(a.any() for a in changes.values())
                params = state.tensors
                left = [p for p in params.values() if moved and p.is_leaf and p.grad is not None and p.grad.any()]
                facts.adaptive = not seen.optimizers or any(type(o).__name__ != "SGD" for o in seen.optimizers)
                facts.low, facts.left = seen.low, facts.left or bool(left)
                grads = {name: np.stack(seen.grads[p]) for name, p in params.items() if p in seen.grads}
                examples = examples_of([a for a in leaves(data) if isinstance(a, Tensor)]) if probe else []
                loss = losses[0].ravel() if len(losses) == 1 else np.zeros(0)
                rest = state.changed(versions)
                rest |= {n: after[n] for n, a in soft.items() if n in after and not np.array_equal(after[n], a)}
                found = normalization.calls if normalization else []
                seen_here = (done, seen.limits)
                send(
                    (facts, seen_here, changes, grads, loss, examples, rest, dict(seen.rates), dict(raw), found, calls)
                )
                if options.clear:
                    for p in left:
                        p.grad = torch.zeros_like(p.grad)
                now = {name: after[name] for name in now}  # without arrays that the step has created

    def _with_names(self, given: Any) -> Any:
        """What a step is given, with names if they are known."""
        return given

    def _reaches(self) -> Any:
        """What the step can reach besides its arguments."""
        return self.take_step

    def _switch_dropout_off(self, state: State) -> bool:
        return self.no_dropout and watch.switch_dropout_off(state.modules)

    def _watch_gradients(self, state: State) -> Arrays:
        """The sum of the gradients that backward passes compute, before anything changes it."""
        found: Arrays = {}

        def add(name: str, grad: Tensor) -> None:
            found[name] = found.get(name, 0) + array_of(grad)

        for name, p in state.tensors.items():
            if p.requires_grad and p.is_leaf and not hasattr(p, "placements"):
                p.register_hook(partial(add, name))
        return found


class PyTorchFile(PyTorch):
    """A file, which each process executes again. Its step gets whole batches, and divides them."""

    def __init__(self, file: str, seconds: float) -> None:
        super().__init__(self._make, self._step, self._draw, True, None, "none", seconds)
        self.file, self.text = file, Path(file).read_text(errors="replace")
        self.has_data = "def example_batch" in self.text

    def _load(self) -> None:
        self.module = execute("step", self.file)

    def _make(self, rank: int, world: int) -> Any:
        if hasattr(self.module, "init_net"):
            return self.module.init_net(LR)
        return {"params": self.module.init_params()}

    def _step(self, state: Any, batch: Any) -> Any:
        if isinstance(state, dict) and "params" in state:
            more: Sequence[Any] = (state["params"], LR)
        else:
            more = state if isinstance(state, (list, tuple)) else [state]
        return self.module.train_batch(*(batch if isinstance(batch, (list, tuple)) else [batch]), *more)

    def _with_names(self, given: Any) -> Any:
        with suppress(ValueError, TypeError):
            parameters = inspect.signature(self.module.train_batch).parameters.values()
            names = [p.name for p in parameters if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
            if isinstance(given, (list, tuple)) and 0 < len(given) < len(names):
                return dict(zip(names[-len(given) :], given))
        return given

    def _reaches(self) -> Any:
        return self.module.train_batch

    def _draw(self, i: int, n: int) -> Any:
        """Images, if the file has no `example_batch`."""
        if self.has_data:
            return None
        X, y = Driver.batch(self, i, n)
        return torch.tensor(X), torch.tensor(y, dtype=torch.int64)

    def _drawn(self, batch: Batch) -> Any:
        """The file's own `example_batch(n)`; each process draws all batches, in the same order."""
        if not self.has_data:
            return super()._drawn(batch)
        if not hasattr(self, "own"):
            default_rng, self.own = np.random.default_rng, dict[Batch, Any]()
            np.random.default_rng = lambda seed=None: default_rng(0 if seed is None else seed)
            for one in sorted(self.data, key=lambda one: (one.n, one.i)):
                seed_all(one.i)
                try:
                    self.own[one] = self.module.example_batch(one.n)
                except Exception as error:
                    raise UsageError(None, self.file, f"example_batch fails: {processes.where(error)}") from error
            np.random.default_rng = default_rng
        return self.own[Batch(batch.i, batch.n)]

    def checks(self, k: int, is_wrong: bool, note: Callable[[str], None]) -> Iterator[Claim]:
        if is_wrong or "def evaluate_accuracy" not in self.text:
            return

        def evaluate(send: Send, rank: int, world: int) -> None:
            self._load()
            state = self._make(rank, world)
            model = state["params"] if isinstance(state, dict) else state[0]
            net = model.eval() if isinstance(model, nn.Module) else None
            X = torch.tensor(Driver.batch(self, 0, 11)[0])
            send(of_file(self.module, X, torch.tensor, model, net))

        outcome = self._group(k, evaluate)
        failure = f"evaluate_accuracy fails: {outcome.failure}"
        yield "accuracy", outcome.stages[0][0] if outcome.stages else failure


def join(rank: int, world: int, ends: tuple[int, int], seconds: float) -> None:
    """Connect the processes, with torchrun's environment variables. The first makes the store, after the forks, because
    the store has threads, and writes its port to a pipe. seconds: how long one may wait for others."""
    torch.set_num_threads(1)
    watch.Compiler.stand_in()
    limit = timedelta(seconds=seconds)
    try:
        if rank == 0:
            global _store  # it ends with the last reference
            _store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
            os.write(ends[1], _store.port.to_bytes(4, "big") * world)
        port = int.from_bytes(os.read(ends[0], 4), "big")
        variables: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        variables |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        variables |= {"TORCHELASTIC_RUN_ID": "check"}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", timeout=limit)
    except Exception as error:
        raise TimeoutError(f"{NOT_CONNECTED}: {error}") from error
    is_allowed = nn.parallel.DistributedDataParallel._check_comm_hook
    nn.parallel.DistributedDataParallel._check_comm_hook = lambda net, hook: (  # gloo sums bfloat16, too
        None if hook.__name__.startswith("bf16_compress") else is_allowed(net, hook)
    )


def seed_all(number: int) -> None:
    """Seed all generators: with the rank, so that only what is sent, or drawn with a seed of its own, is equal."""
    torch.manual_seed(number)
    np.random.seed(number)
    python_random.seed(number)


def divided(how: str, k: int, n: int) -> list[list[int]]:
    """The examples of each process."""
    return [[*range(n)][r::k] if how == "strided" else np.array_split(range(n), k)[r].tolist() for r in range(k)]


def same(value: Any) -> Any:
    return value


def copied(value: Any, double: bool, requires_grad: bool, scale: float = 1) -> Any:
    """A side's own copy of a tensor or an array of a batch."""
    if not isinstance(value, Tensor):
        is_float = value.dtype.kind == "f"
        return value.astype(np.float64 if double else value.dtype) * scale if is_float else value.copy()
    value = value.detach().clone()
    if value.is_complex():
        return value.to(torch.complex128) if double else value
    if value.is_floating_point():
        value = (value.double() if double else value) * scale
        return value if value.is_sparse else value.requires_grad_(requires_grad)
    return value


def spoil(data: Any, n: int, value: float) -> None:
    """Set the inputs of the last example."""
    for a in leaves(data):
        is_float = a.is_floating_point() if isinstance(a, Tensor) else a.dtype.kind == "f"
        if is_float and a.ndim and len(a) == n and not getattr(a, "is_sparse", False):
            a[-1] = value


def summary(data: Any) -> list[float]:
    """Numbers that are the same for the same batch."""
    return [
        float(abs(a).sum()) if not getattr(a, "is_sparse", False) else float(abs(a.to_dense()).sum())
        for a in leaves(data)
        if not isinstance(a, np.ndarray) or a.dtype.kind in "fiub"
    ]


def examples_of(found: Sequence[Tensor]) -> list[int]:
    """The examples of which a step has computed gradients."""
    grads = [a.grad.flatten(1).abs().sum(1) if a.ndim > 1 else a.grad.abs() for a in found if a.grad is not None]
    return sum(grads).nonzero().ravel().tolist() if grads else []
