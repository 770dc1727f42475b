"""Takes the steps of a JAX file on several CPU devices and on one: each side in a process that has no other devices.

`train_batch` has one of two forms: scratch.py's, with a list of parameters for each device, and that of sharding.py,
with arrays that are divided among the devices.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gluon_mgpu.check.processes as processes
import gluon_mgpu.check.reached as reached
from gluon_mgpu.check.accuracy import of_file
from gluon_mgpu.check.driver import AS_WRITTEN, Arrays, Claim, Driver, Facts, Options, Session, Shards, StepResult
from gluon_mgpu.check.driver import changes as changes_of
from gluon_mgpu.check.judge import Report, compare
from gluon_mgpu.check.kept import kept
from gluon_mgpu.check.processes import Send
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.support.programs import execute

LR = 0.1
# functions of jax.random that draw nothing that depends on the precision
KEYS = {"key", "PRNGKey", "split", "fold_in", "wrap_key_data", "key_data", "key_impl", "clone", "permutation"}
LOW = ("float16", "bfloat16")


def compare_file(path: str, devices: Sequence[int], steps: int, even: bool, seconds: float) -> Report:
    """Compare the steps of a file with `train_batch` and `init_params`."""
    if len(os.listdir("/proc/self/task")) > 1 and jax._src.xla_bridge.backends_are_initialized():
        advice = "JAX has started in this process, and its threads cannot be copied; check in another process"
        raise UsageError(None, path, advice)
    return compare(JAX(os.path.realpath(path), seconds), devices, steps, even)


class JAX(Driver):
    """seconds: the limit of a step. shapes: of the state on one device. done: what has run of the file's functions."""

    divides = "split_and_load"
    advice = {
        **Driver.advice,
        "not summed": "replace each by the sum over the devices before the update, as allreduce or jax.lax.psum does",
        "replicas": "update each replica with the same sum",
    }

    def __init__(self, file: str, seconds: float) -> None:
        self.file, self.seconds = file, seconds
        self.shapes, self.done = dict[str, Any](), reached.Done()
        self.has_replicas, self.has_batches = self._in_process(_form)
        self.uneven = self.has_replicas

    def _in_process(self, function: Callable[[ModuleType], Any], k: int = 1) -> Any:
        """What a function of a fresh copy of the file returns, in a process with k devices."""
        outcome = processes.run([lambda send: send([function(load(self.file, k))])], self.seconds)
        if outcome.failure:
            raise UsageError(None, self.file, outcome.failure)
        return outcome.stages[0][0][0]

    def batch(self, i: int, n: int) -> Any:
        """The file's own `example_batch(n)`, or images."""

        def draw(module: ModuleType) -> Any:
            np.random.seed(i)
            batch = module.example_batch(n)
            return jax.tree.map(np.asarray, batch if isinstance(batch, (list, tuple)) else [batch])

        return self._in_process(draw) if self.has_batches else super().batch(i, n)

    def take(self, batch: Any, examples: Sequence[int]) -> Any:
        return jax.tree.map(lambda array: array[[*examples]], batch)

    def split(self, k: int, batch: Any, n: int) -> Shards | None:
        def parts(module: ModuleType) -> Shards | None:
            if not self.has_replicas or not hasattr(module, "split_and_load"):
                return None
            return [
                np.asarray(part).astype(int).tolist() for part in module.split_and_load(np.arange(n), jax.devices())
            ]

        try:
            return self._in_process(parts, k)
        except UsageError:  # the step fails, too
            return None

    def run(self, k: int, batches: Sequence[Any], options: Options = AS_WRITTEN) -> Session:
        side = Side(self.file, k, self.has_replicas, options.double, options.constant, self.shapes)
        outcome = processes.run([functools.partial(side.take_steps, batches)], self.seconds)
        session, before = Session(failure=outcome.failure, late=outcome.late), list[Arrays]()
        for i, [(facts, done, now, rest)] in enumerate(outcome.stages):
            session.facts, now = facts, joined(now, self.shapes)
            reached.add(self.done, done)
            if i:
                session.steps.append(StepResult(changes_of(before, now), rest=rest))
            else:
                session.start, session.kept = now, rest
            before = now
        if k == 1 and session.start:
            self.shapes = {name: a.shape for name, a in session.start[0].items()}
        return session

    def missed(self) -> list[str]:
        return reached.missed(self.done)

    def checks(self, k: int, is_wrong: bool, note: Callable[[str], None]) -> Iterator[Claim]:
        if is_wrong:
            return
        if not self.uneven:
            note("uneven batches were not checked: a NamedSharding divides only even ones")
        yield "accuracy", self._accuracy

    @cached_property
    def _accuracy(self) -> str:
        """What is wrong with the file's `evaluate_accuracy`."""
        X, *_ = self.batch(0, 11)

        def accuracy(module: ModuleType) -> str:
            return of_file(module, X, lambda y: np.array(y, np.int32), module.init_params())

        return self._in_process(accuracy)


@dataclass
class Side:
    """Steps on one number of devices. See `JAX.run`. shapes: of the state on one device."""

    file: str
    k: int
    has_replicas: bool
    double: bool
    constant: bool
    shapes: dict[str, Any]
    facts: Facts = field(default_factory=Facts)

    def take_steps(self, batches: Sequence[Any], send: Send) -> None:
        """Send the state of each device before the first step; after each step also what the file keeps."""
        random = {name: function for name, function in vars(jax.random).items() if name not in KEYS}
        for name, function in random.items():
            if inspect.isfunction(function) and "key" in inspect.signature(function).parameters:
                setattr(jax.random, name, self._drawn(function))
        self.is_drawing = True  # as the file does, also if the steps are in float64: for the same random numbers
        module = load(self.file, self.k)
        state = self._placed(module, module.init_params())
        self.is_drawing = False
        self._watch()
        state, done = jax.tree.map(self._own, state), reached.Done()
        send((self.facts, done, self._read(state), kept(module, jax.devices())))
        for batch in batches:
            with nullcontext() if self.double else reached.traced(done):  # it takes long; the lines are the same
                state = self._step(module, jax.tree.map(self._own, batch), state)
            send((self.facts, done, self._read(state), kept(module, jax.devices())))

    def _own(self, a: Any) -> Any:
        """An array in this side's precision."""
        if jnp.issubdtype(a.dtype, np.floating) and (self.double or a.dtype == np.float64):
            return a.astype(np.float64 if self.double else np.float32)
        return a

    def _placed(self, module: ModuleType, params: Any) -> Any:
        """The state before the first step: of each device, or on all devices."""
        if self.has_replicas:
            get = getattr(module, "get_params", jax.device_put)
            return [get(params, device) for device in jax.devices()]
        everywhere = NamedSharding(_mesh(module), PartitionSpec())
        is_placed = lambda a: isinstance(a, jax.Array) and len(a.devices()) == self.k > 1  # noqa: E731
        return jax.tree.map(lambda a: a if is_placed(a) else jax.device_put(a, everywhere), params)

    def _step(self, module: ModuleType, batch: Any, state: Any) -> Any:
        """The state after a step. What the step returns besides it, such as a loss, is left out."""
        if self.has_replicas:
            new = module.train_batch(*batch, state, jax.devices(), LR)
        else:
            mesh = _mesh(module)
            divided = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])))
            new = module.train_batch(*divided, state, LR)
        same = jax.tree.structure(state)
        if isinstance(new, tuple) and jax.tree.structure(new) != same and jax.tree.structure(new[0]) == same:
            new = new[0]
        for device, of_device in zip(jax.devices(), new) if self.has_replicas else ():
            if elsewhere := [a for a in jax.tree.leaves(of_device) if a.devices() != {device}]:
                raise ValueError(f"the new parameters of {device} are on {elsewhere[0].devices()}")
        return new

    def _read(self, state: Any) -> list[Arrays]:
        """The arrays of each device, except for keys."""
        if self.has_replicas:
            return [{name: np.asarray(a, np.float64) for name, a in arrays(of_device)} for of_device in state]
        found = [Arrays() for _ in range(self.k)]
        for name, a in arrays(state):
            parts = self._replicas(a, self.shapes.get(name))
            for of_device, part in zip(found, parts):
                of_device[name] = np.asarray(part, np.float64)
        return found

    def _replicas(self, a: Any, shape: Any) -> Sequence[Any]:
        """What each device has of an array: all of it or, as pmap, a row; what all have together if a sharding divides
        it. shape: on one device."""
        if isinstance(a, jax.Array) and a.is_fully_replicated and len(a.devices()) == self.k:
            return [shard.data for shard in sorted(a.addressable_shards, key=lambda shard: shard.device.id)]
        if shape is not None and shape != np.shape(a) == (self.k, *shape[1:]):
            return [a[i : i + 1] for i in range(self.k)]
        return [a] * self.k

    def _watch(self) -> None:
        """Note the lowest precision. In float64, compute in float64 instead."""
        convert = jax.lax.convert_element_type_p
        bind = convert.bind

        def noted(*args: Any, **params: Any) -> Any:
            name = str(np.dtype(params["new_dtype"]))
            if name in LOW:
                self.facts.low = name
            if self.double and not self.is_drawing and jnp.issubdtype(params["new_dtype"], jnp.floating):
                params["new_dtype"] = np.dtype(np.float64)
            return bind(*args, **params)

        convert.bind = noted
        jax.config.update("jax_enable_x64", self.double)

    def _drawn(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        """A function of jax.random that draws what it draws in float32, also in float64."""
        takes_dtype = inspect.signature(draw).parameters.get("dtype")

        def drawn(*args: Any, **options: Any) -> Any:
            if self.is_drawing:
                return draw(*args, **options)
            self.is_drawing = self.facts.draws = True
            try:
                bound = inspect.signature(draw).bind(*args, **options)
                bound.apply_defaults()
                if takes_dtype and self.double:
                    kind = np.dtype(bound.arguments["dtype"] or takes_dtype.default or float)
                    bound.arguments["dtype"] = {"f": np.float32, "i": np.int32, "u": np.uint32}.get(kind.kind, kind)
                single = {name: _as(value, np.float64, np.float32) for name, value in bound.arguments.items()}
                bound.arguments.update(single)
                numbers = draw(*bound.args, **bound.kwargs)
            finally:
                self.is_drawing = False
            if self.constant:
                numbers = jnp.full_like(numbers, numbers.dtype.kind in "fb" and 0.5)
            return _as(numbers, np.float32, np.float64) if self.double else numbers

        return drawn


def load(file: str, k: int) -> ModuleType:
    """Execute a file in this process, with k devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", k)
    # The batches are small: optimized code does not pay.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    sys.path.insert(0, str(Path(file).parent))
    return execute("step", file)


def _form(module: ModuleType) -> tuple[bool, bool]:
    """Whether `train_batch` gets a list of parameters for each device, and the devices, and whether the file has
    batches of its own."""
    parameters = inspect.signature(module.train_batch).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty]
    return "devices" in needed or len(needed) > 4, hasattr(module, "example_batch")


def _mesh(module: ModuleType) -> Mesh:
    """The file's own mesh, or one of all devices."""
    own = [value for value in vars(module).values() if isinstance(value, Mesh)]
    return own[0] if own else Mesh(np.array(jax.devices()), ("devices",))


def arrays(state: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a state, with their keys as names, except for the keys of random numbers."""
    for path, a in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not jnp.issubdtype(getattr(a, "dtype", float), jax.dtypes.prng_key):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            yield name if not name[:1].isdigit() else f"params{jax.tree_util.keystr(path)}", a


def joined(devices: list[Arrays], shapes: dict[str, Any]) -> list[Arrays]:
    """The arrays of each device. Those of which each has a part, as with ZeRO, are put together. shapes: on one."""
    whole = dict[str, np.ndarray]()
    for name, shape in shapes.items():
        parts = [arrays[name].ravel() for arrays in devices if name in arrays and arrays[name].shape != shape]
        if len(parts) == len(devices) and sum(map(len, parts)) == np.prod(shape, dtype=int):
            whole[name] = np.concatenate(parts).reshape(shape)
    return [{**arrays, **whole} for arrays in devices]


def _as(value: Any, dtype: Any, new: Any) -> Any:
    """An array of one type as one of another; any other value as it is."""
    return value.astype(new) if getattr(value, "dtype", None) == dtype else value
