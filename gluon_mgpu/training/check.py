"""Takes a lesson's step on several devices and on one, and compares them: the same batch, from the same parameters.

That both give the same update is the claim of data parallelism. `compare` checks it claim by claim. This module takes
the steps, and sees on which devices they compute; `gluon_mgpu.check.comparison` judges the arrays.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import FunctionType, ModuleType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, nd
from mxnet.ndarray import NDArray

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.check import comparison
from gluon_mgpu.check.comparison import EXAMPLES, RATES, Arrays, Claims, Report, StepResult
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.data.generators import restored_afterward, seed_generators
from gluon_mgpu.data.splitting import shard_sizes
from gluon_mgpu.support.errors import UsageError, reason
from gluon_mgpu.training import lessons
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.lesson_state import copied, copyable, keep, kept
from gluon_mgpu.training.model import read_arrays
from gluon_mgpu.training.models import ArrayModel, create_model

Inputs = tuple[np.ndarray, np.ndarray, float]  # images, labels, learning rate
NETWORK = scratch.lenet.__name__
FUNCTIONS = ("train_batch", "split_and_load", "forward_backward", "allreduce", "sgd", NETWORK)


def compare(
    lesson: ModuleType,
    ctx: list[Context],
    config: Config | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
) -> Report:
    """Take steps with a lesson's `train_batch` on ctx and on ctx[0], and check what a step must do.

    ctx: at least two devices. config: only its network, and how the network is computed, are used. image_shape,
    classes: see `create_model`.
    """
    if len(ctx) < 2:
        raise UsageError("gpus", len(ctx), "the comparison with one device needs at least 2 devices")
    with copyable(), _without_dropout() as dropped, restored_afterward():
        try:
            report = _Comparison(lesson, ctx, config or Config(), image_shape, classes).report()
        except _StepFailed as failure:
            report = Report(failure.claims)
    report.how += ["with dropout off"] * bool(dropped)
    return report


class _StepFailed(Exception):
    """A step fails, so the comparison ends. claims: what is known then."""

    def __init__(self, claims: Claims) -> None:
        super().__init__()
        self.claims = claims


@dataclass
class _Calls:
    """What a step called. own, others: the functions of the lesson, and those of the same name in other modules.
    examples: how many the network computed on each device. labels: how the labels do not match their images."""

    own: set[str] = field(default_factory=set)
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)
    examples: Counter[Context] = field(default_factory=Counter)
    labels: str = ""


class _Side:
    """A model with its own copy of what the lesson's module keeps between steps, such as velocities."""

    def __init__(self, lesson: ModuleType, ctx: list[Context], config: Config, *data: Any) -> None:
        self.lesson, self.calls = lesson, _Calls()
        self.state = copied(kept(lesson))
        with self.active():
            self.model = create_model(lesson, ctx, config, *data)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put this model's values into the lesson's module; afterward, the module has its own again."""
        original = kept(self.lesson)
        keep(self.lesson, self.state)
        try:
            yield
        finally:
            self.state = kept(self.lesson)
            keep(self.lesson, original)

    def step(self, start: Arrays, batch: Inputs, seed: int = 0, shards: Sequence[Sequence[int]] = ()) -> StepResult:
        """Take one step from the parameters `start`. shards: see `_watched`."""
        self.load(start)
        self.calls = _Calls()
        seed_generators(seed)
        with self.active(), _watched(self.lesson, self.calls, shards):
            losses = self.run(*batch)
            nd.waitall()
        if not self.calls.examples:  # the network was called by another name
            self.calls.examples.update({shard.context: shard.size for shard in losses})
        replicas = self.arrays()
        changes = [{name: a.astype(np.float64) - start[name] for name, a in arrays.items()} for arrays in replicas]
        grads = [{n: g.asnumpy() for n, g in self.model.grads(i).items()} for i in range(len(replicas))]
        return StepResult(np.concatenate([shard.asnumpy().reshape(-1) for shard in losses]), changes, grads)

    def run(self, X: np.ndarray, y: np.ndarray, lr: float) -> list[NDArray]:
        return self.model.step(nd.array(X), nd.array(y), lr)

    def load(self, start: Arrays) -> None:
        self.model.load(start)

    def arrays(self) -> list[Arrays]:
        return [read_arrays(self.model, device) for device in range(len(self.model.ctx))]


class _Float64(_Side):
    """A model on the CPU that computes in float64. Raises an error if the lesson cannot."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        model: Any = self.model
        if isinstance(model, ArrayModel):
            params = self.lesson.get_params([p.astype("float64") for p in model.device_params[0]], model.ctx[0])
            model.device_params[0][:] = params
            self.now = dict(zip(model.names, params))
        else:
            model.net.cast("float64")
            self.now = {name: p.data() for name, p in model.parameters.items()}

    def run(self, X: np.ndarray, y: np.ndarray, lr: float) -> list[NDArray]:
        return self.model.step(nd.array(X, dtype="float64"), nd.array(y, dtype="float64"), lr)

    def load(self, start: Arrays) -> None:
        for name, array in self.now.items():
            nd.array(start[name], dtype="float64").copyto(array)

    def arrays(self) -> list[Arrays]:
        nd.waitall()
        return [{name: array.asnumpy() for name, array in self.now.items()}]


class _Comparison:
    """one, several: the models that take the same steps, on one device and on all. aside: for other steps, on one.
    exact: as one, in float64; None if the lesson cannot. by_shard: whether the network has batch normalization, which
    sees only a shard, so that the network gets one shard after the other on one device, too."""

    def __init__(
        self, lesson: ModuleType, ctx: list[Context], config: Config, image_shape: Sequence[int], classes: int
    ) -> None:
        self.lesson, self.ctx, self.names = lesson, ctx, [str(c) for c in ctx]
        self.rng, self.image_shape, self.classes = np.random.default_rng(0), tuple(image_shape), classes
        plain = Config(impl=lessons.name_of(lesson), model=config.model)
        same = replace(plain, zero=config.zero, tune=config.tune, hybridize=config.hybridize)
        lessons.check_settings(same, lesson)
        data = (image_shape, classes)
        self.one, self.aside = (_Side(lesson, ctx[:1], plain, *data) for _ in range(2))
        try:
            self.several = _Side(lesson, ctx, same, *data)
        except Exception as error:
            raise _StepFailed({"several": _explained(error, _Calls())}) from error
        self.exact: _Float64 | None = None
        with suppress(Exception):
            self.exact = _Float64(lesson, [mx.cpu(0)], plain, *data)
        self.start = {  # larger than a lesson's parameters, so that each example has its own loss and gradient
            name: self.rng.normal(0, (2 / np.prod(a.shape[1:])) ** 0.5, a.shape).astype(np.float32) if a.ndim > 1 else a
            for name, a in self.one.arrays()[0].items()
        }
        self.by_shard, self.random, self.moves = bool(self.one.model.running_stats), False, False
        self.fresh, self.alone = copied(self.aside.state), ""  # alone: what is wrong on one device, too
        self.notes: list[str] = []

    def report(self) -> Report:
        claims: Claims = {"start": comparison.start(self.several.arrays()), "devices": self._placed()}
        batches = [
            self._compare_step(claims, self._batch(len(self.ctx) * n + (i == 1), lr), first=i == 0)
            for i, (n, lr) in enumerate(zip(EXAMPLES, RATES))
        ]
        steps = comparison.combine(batches)
        if not self.moves and not any(batch["update"] for batch in batches):
            steps["update"] = "the steps do not change the parameters; assign in place, as in p[:] = p - lr * p.grad"
        placed, computed, split = claims["devices"], steps.pop("devices"), steps.pop("split")
        claims |= {"devices": placed or computed, "called": self._called(), "split": split, **self._sum(), **steps}
        claims["update"] = claims["update"] or self.alone or self._late()
        claims["accuracy"] = self._accuracy()
        if self.random and Report(claims).verdict:
            claims = {"repeatable": "a step draws different random numbers on each device; check it without them"}
        how = ["compared shard by shard"] * self.by_shard + ["with the same random numbers"] * self.random
        return Report(claims, how, self.notes)

    def _batch(self, n: int, lr: float) -> Inputs:
        return self.rng.random((n, *self.image_shape)).astype(np.float32), self.rng.integers(0, self.classes, n), lr

    def _placed(self) -> str:
        """Whether each replica is on its own device."""
        for i, c in enumerate(self.ctx):
            arrays = self.several.model.arrays(i).values()
            places = {a.context for a in arrays} | {a.grad.context for a in arrays if a.grad is not None}
            if places != {c}:
                where = ", ".join(sorted(str(place) for place in places - {c}))
                return f"the replica of {c} is on {where}; copy the parameters to each device, as in p.copyto(ctx)"
        return ""

    def _computed(self) -> str:
        """Whether each device computes examples."""
        used = [c for c in self.ctx if self.several.calls.examples[c]]
        idle = ", ".join(str(c) for c in self.ctx if c not in used)
        if not idle or not self.several.calls.examples:
            return ""
        where = ", ".join(str(c) for c in self.several.calls.examples)
        return f"no examples are computed on {idle}, because all shards are on {where}; put shard i on ctx[i]"

    def _is_called(self, name: str) -> bool:
        """Whether the step calls a function of the lesson, or of another module with the same code."""
        own, other = getattr(self.lesson, name, None), self.several.calls.others.get(name)
        codes = [getattr(inspect.unwrap(f), "__code__", f) for f in (own, other) if f]
        same = len(codes) == 2 and codes[0] == codes[1]
        return name in self.several.calls.own or same

    def _called(self) -> str:
        """Whether the step calls the lesson's own functions, and no others with the same names."""
        for name, other in self.several.calls.others.items():
            if hasattr(self.lesson, name) and not self._is_called(name):
                advice = "copy the whole lesson into your file, instead of importing it"
                return f"{name} is not called; the step calls {other.__module__}.{name}; {advice}"
        return ""

    def _compare_step(self, before: Claims, batch: Inputs, first: bool) -> Claims:
        """The claims for one batch. before: what is known, if the step fails."""
        X, y, lr = batch
        n, start, earlier = len(X), self.start, copied(self.one.state)

        def step(
            chosen: Any = slice(None), seed: int = 0, shards: Sequence[Sequence[int]] = (), lr: float = lr
        ) -> StepResult:
            """Take another step on one device, from the same parameters, with what the lesson had kept."""
            self.aside.state = copied(earlier)
            return self._on_one(self.aside, (X[chosen], y[chosen], lr), seed, shards)

        whole = self._on_one(self.one, batch)
        again = step(seed=1) if first else whole
        if wrong := comparison.not_finite(whole):
            raise _StepFailed({"runs": wrong})
        self.random |= bool((whole.losses != again.losses).any())
        shards, split = self._split(n)
        claims: Claims = {"devices": "", "split": split}
        try:
            taken = self.several.step(start, batch)
        except UsageError:
            raise
        except Exception as error:
            idle = self._computed() if "has not been updated by backward" in str(error) else ""
            why = {"devices": before["devices"] or idle, "split": split}
            raise _StepFailed({**before, **why, "several": _explained(error, self.several.calls)}) from error
        if not self._is_called("split_and_load"):
            claims["split"] = None
        alone = [step(shard) for shard in shards]
        parts = comparison.weighted(alone, [len(shard) for shard in shards])
        by_shard = np.concatenate([shard.losses for shard in alone])
        losses, [expected] = whole.losses, whole.changes
        if self.by_shard:
            losses, [expected] = by_shard, step(shards=shards).changes
            for name in self.one.model.running_stats:  # `models` averages those of all devices after each step
                expected[name] = np.sum([part[name] for part in parts], axis=0)
        order = np.random.default_rng(1).permutation(n)
        moved = whole if self.random else step(order)
        terms = n * int(np.prod(X.shape[2:]))
        claims["losses"] = comparison.losses(moved, whole.losses, n, terms)
        claims["losses"] = claims["losses"] or comparison.losses(taken, losses, n, terms, by_shard)
        if not self.random and not comparison.alike(moved.losses, step(order, lr=lr * 1e-6).losses, terms):
            claims["losses"] = "losses are computed with parameters that this step has changed; update last"
        bound = comparison.order_bound(parts, start, terms)
        if exact := self._exact(batch, shards, parts):
            bound = comparison.rounding_bound(expected, exact, parts, start, terms)
            if first:
                self.notes.append(comparison.rounding_note(taken.changes[0], expected, exact, bound))
        if self.by_shard and first:
            far = comparison.distance(taken.changes[0], whole.changes[0])
            self.notes.append(f"batch normalization: the step on the whole batch differs by {far:.0%}")
        claims["devices"] = self._computed()
        claims["replicas"] = comparison.replicas(taken)
        claims["update"] = comparison.update(self.names, taken.changes[0], expected, parts, bound, start)
        self.moves |= any(change.any() for change in whole.changes[0].values())
        return claims

    def _on_one(self, side: _Side, *args: Any) -> StepResult:
        """Take a step on one device."""
        try:
            return side.step(self.start, *args)
        except UsageError:
            raise
        except Exception as error:
            raise _StepFailed({"runs": _explained(error, side.calls)}) from error

    def _exact(self, batch: Inputs, shards: Sequence[Sequence[int]], parts: Sequence[Arrays]) -> Arrays | None:
        """The update in float64, if the lesson can compute it."""
        if not self.exact or self.random:
            return None
        try:
            [exact] = self.exact.step(self.start, batch, shards=shards if self.by_shard else ()).changes
        except Exception:
            self.exact = None
            return None
        return exact | {name: np.sum([part[name] for part in parts], axis=0) for name in self.one.model.running_stats}

    def _split(self, n: int) -> tuple[list[list[int]], str]:
        """The indices of each shard's examples, and whether each example is on exactly one device."""
        ends = [*accumulate(shard_sizes(n, len(self.ctx)))]
        usual = [list(range(start, end)) for start, end in zip([0, *ends], ends)]
        if not hasattr(self.lesson, "split_and_load"):
            return usual, ""
        earlier = copied(self.aside.state)
        try:
            with self.aside.active():
                for first in (10**7, 10**6):  # of the first batch, nothing may come back in the second
                    numbers = nd.arange(first, first + n)
                    images = numbers.reshape((n, 1, 1, 1)).broadcast_to((n, *self.image_shape))
                    Xs, ys = (self.lesson.split_and_load(data, self.ctx) for data in (images, numbers))
        except UsageError:
            raise
        except Exception as error:
            return usual, f"split_and_load fails for {n} examples: {_explained(error, _Calls())}"
        self.aside.state = earlier
        if wrong := [X.shape for X in Xs if X.shape[1:] != self.image_shape]:
            return usual, f"split_and_load returns images of shape {wrong[0][1:]}; split along the first axis"
        found = [(X.reshape((X.shape[0], -1))[:, 0].asnumpy() - first).astype(int).tolist() for X in Xs if X.size]
        if any(not (0 <= number < n or 0 <= number + first - 10**7 < n) for number in sum(found, [])):
            return usual, "split_and_load changes the images; leave each as it is"
        if found != [(y.asnumpy() - first).astype(int).tolist() for y in ys if y.size] and not self.random:
            return usual, "split_and_load splits images and labels differently; give each image its own label"
        split = comparison.split(found, n)
        return (usual if split else found), split

    def _sum(self) -> Claims:
        """Whether `allreduce` leaves the sum in the arrays of each device, also if it is called again. What it does to
        the array of a single device is wrong for any step."""
        if not hasattr(self.lesson, "allreduce"):
            return {}
        if not self._is_called("allreduce"):
            return {"sum": None}
        rng, found = np.random.default_rng(1), []
        size = max(a.size for a in self.start.values())
        with self.aside.active():
            for ctx in (self.ctx, self.ctx, self.ctx[:1], self.ctx[:1]):
                values = rng.normal(size=(len(ctx), 7, size // 7 + 1)).astype(np.float32)
                arrays = [nd.array(value, ctx=c) for value, c in zip(values, ctx)]
                given = list(arrays)
                try:
                    returned = self.lesson.allreduce(given) or arrays
                except Exception:  # it may know only the shapes of the parameters; `_compare_step` has tried these
                    return {"sum": None}
                results = [np.stack([a.asnumpy() for a in some]) for some in (arrays, given, returned)]
                found.append([comparison.reduced(values, result, self.names) for result in results])
        (first, in_list, in_returned), again, *alone = found
        if (again[0] and not first) or (all(alone[1]) and not all(alone[0])):
            self.alone = "allreduce adds what an earlier call left; start each sum from 0"
        elif all(alone[0]):
            self.alone = first or "with one device, allreduce changes the gradients; leave a single array unchanged"
        if first and not in_list:
            first = "allreduce puts the sum into the list, not into the caller's arrays; use d[:] = total"
        return {"sum": self.alone or (first if in_returned else "")}

    def _late(self) -> str:
        """Whether a step uses the gradients of its own batch. What a step does may depend on earlier batches, too, as
        with momentum."""
        if self.random or not self.moves:
            return ""
        first, second, other = (self._batch(4, 0.7) for _ in range(3))
        changes = []
        for batch in (second, other):
            self.aside.state = copied(self.fresh)
            self._on_one(self.aside, first)
            changes.append(self._on_one(self.aside, batch).changes[0])
        moves = any(change.any() for change in changes[0].values())
        if moves and all((changes[0][name] == changes[1][name]).all() for name in changes[0]):
            return "a step uses the gradients of an earlier batch; update with those of its own"
        return ""

    def _accuracy(self) -> str:
        """Whether `evaluate_accuracy` counts each example once."""
        if not hasattr(self.lesson, "evaluate_accuracy"):
            return ""
        k, batches = len(self.ctx), []
        for model in (self.one, self.several):
            model.load(self.start)
        for n in (3 * k + 2, 2 * k + 1):
            X = nd.array(self.rng.random((n, *self.image_shape)))
            with self.one.active():
                scores = self.one.model.predict(X.as_in_context(self.ctx[0])).asnumpy()[:, : self.classes]
            second, best = scores.argsort(axis=1).T[-2:]
            wrong = (np.arange(n) > 0) & (np.arange(n) < n - 2)  # three of each batch are right
            batches.append((X, nd.array(np.where(wrong, second, best))))
        expected = 3 * len(batches) / sum(len(y) for _, y in batches)
        try:
            with self.several.active():
                accuracy = float(self.several.model.evaluate_accuracy(iter(batches)))
        except UsageError:
            raise
        except Exception as error:
            return f"evaluate_accuracy fails: {_explained(error, _Calls())}"
        if abs(accuracy - expected) < 1e-6:
            return ""
        return f"evaluate_accuracy returns {accuracy:.4f} instead of {expected:.4f}; count each example once"


def _explained(error: Exception, calls: _Calls) -> str:
    """Why a step fails, in the lesson's terms where the cause is known."""
    text = str(error)
    if calls.labels:
        return calls.labels
    if "not in a computational graph" in text:
        return "backward finds nothing recorded; compute the loss in autograd.record(), and call attach_grad"
    if re.search(r"_update expects \d+ inputs", text):
        return "a parameter has no gradient (p.grad is None); call attach_grad for each"
    if stale := re.search(r"on context (\S+) has not been updated by backward", text):
        return f"trainer.step finds no new gradients on {stale[1]}; call backward on each device, and step once"
    if re.search(r"same context|not initialized on context|ctx\(\) ==", text):
        return "the network is not on all devices; call initialize once, with the whole list: initialize(ctx=ctx)"
    if "evenly split" in text:
        return "uneven batches are rejected; give some shards one more example (even_split=False)"
    return reason(error)


@contextmanager
def _watched(lesson: ModuleType, calls: _Calls, shards: Sequence[Sequence[int]]) -> Iterator[None]:
    """Record what a step calls, in the lesson and where it may take its functions from. shards: the indices of the
    examples that the Gluon network gets at a time; empty: all at once."""
    functions = [inspect.unwrap(getattr(lesson, name)) for name in FUNCTIONS if hasattr(lesson, name)]
    spaces = {id(space): space for space in map(vars, (lesson, scratch, highlevel))}
    spaces |= {id(f.__globals__): f.__globals__ for f in functions if isinstance(f, FunctionType)}

    def count(_: Any, inputs: Sequence[NDArray]) -> None:
        calls.examples[inputs[0].context] += inputs[0].shape[0]

    def watch(name: str, function: Callable[..., Any], own: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if own:
                calls.own.add(name)
            else:
                calls.others[name] = function
            with ExitStack() as stack:
                if name == NETWORK and args:
                    count(args[1], args)
                if name == "forward_backward" and len(args) == 3:
                    sizes = [[array.shape[0] for array in arrays] for arrays in args[1:]]
                    if sizes[0] != sizes[1]:
                        found = f"{sizes[1]} labels for shards of {sizes[0]} images"
                        calls.labels = f"{found}; split the labels like the images"
                if name == "train_batch" and own and isinstance(args[2], gluon.Block):
                    stack.callback(args[2].register_forward_pre_hook(count).detach)
                    if shards:
                        args = (*args[:2], _ByShard(args[2], shards), *args[3:])
                return function(*args, **options)

        return call

    replaced = [(space, name, space[name]) for space in spaces.values() for name in FUNCTIONS if name in space]
    for space, name, function in replaced:
        space[name] = watch(name, function, space is vars(lesson))
    try:
        yield
    finally:
        for space, name, function in replaced:
            space[name] = function


class _ByShard:
    """A network that gets one shard after the other. shards: the indices of their examples."""

    def __init__(self, net: gluon.Block, shards: Sequence[Sequence[int]]) -> None:
        self.net, self.shards = net, shards

    def __call__(self, X: NDArray) -> NDArray:
        parts = [self.net(nd.take(X, nd.array(shard, ctx=X.context))) for shard in self.shards]
        return nd.take(nd.concat(*parts, dim=0), nd.array(np.argsort(np.concatenate(self.shards)), ctx=X.context))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)


@contextmanager
def _without_dropout() -> Iterator[list[float]]:
    """Let dropout keep all values. Yields the rates that were asked for."""
    rates: list[float] = []

    def keeping(dropout: Callable[..., Any]) -> Callable[..., Any]:
        def call(data: Any, p: float = 0.5, **options: Any) -> Any:
            rates.extend([p] * (p > 0))
            return dropout(data, p=0, **options)

        return call

    originals = [(space, name, getattr(space, name)) for space, name in ((nd, "Dropout"), (mx.sym, "Dropout"))]
    originals.append((mx.npx, "dropout", mx.npx.dropout))
    for space, name, dropout in originals:
        setattr(space, name, keeping(dropout))
    try:
        yield rates
    finally:
        for space, name, dropout in originals:
            setattr(space, name, dropout)
