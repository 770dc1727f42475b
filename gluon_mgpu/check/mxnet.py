"""Takes a lesson's steps on several devices and on one, each time with a fresh execution of its file.

`compare` adds to the judge's claims what only a lesson's own functions can tell: on which devices they compute, and
what `split_and_load`, `allreduce` and `evaluate_accuracy` do when they are called alone.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, nd
from mxnet.ndarray import NDArray

import gluon_mgpu.check.judge as judge
from gluon_mgpu import highlevel, scratch
from gluon_mgpu.check.judge import Arrays, Claims, Report, Session, Shards, Step
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.data.generators import restored_afterward, seed_generators
from gluon_mgpu.support.errors import UsageError, reason
from gluon_mgpu.training import lessons
from gluon_mgpu.training.config import LESSONS, Config
from gluon_mgpu.training.model import read_arrays
from gluon_mgpu.training.models import ArrayModel, GluonModel, create_model

Batch = tuple[np.ndarray, np.ndarray]  # images and labels
NETWORK = scratch.lenet.__name__
FUNCTIONS = ("train_batch", "split_and_load", "forward_backward", "allreduce", "sgd", NETWORK)
LR = 0.7  # not 1, so that a power of it is another number
STEPS = 2


def compare(
    lesson: ModuleType | str | Callable[[], ModuleType],
    ctx: list[Context],
    config: Config | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
    steps: int = STEPS,
    even: bool = False,
) -> Report:
    """Take steps with a lesson's `train_batch` on ctx and on ctx[0], and check what a step must do.

    lesson: a lesson, its name or path, or a function that returns a fresh one. ctx: at least two devices. config: only
    its network, and how the network is computed, are used. image_shape, classes: see `create_model`.
    """
    if len(ctx) < 2:
        raise UsageError("gpus", len(ctx), "the comparison with one device needs at least 2 devices")
    load = lesson if callable(lesson) else functools.partial(executed_again, lesson)
    with _without_dropout() as dropped, restored_afterward():
        driver = MXNet(load, ctx, config or Config(), image_shape, classes)
        report = judge.compare(driver, len(ctx), steps, even)
        report.claims = driver.claims(report)
    report.how += ["with dropout off"] * bool(dropped)
    return report


def executed_again(lesson: ModuleType | str) -> ModuleType:
    """A fresh execution of a lesson's file, with the functions that were replaced in it. A lesson without a file
    is returned as it is."""
    if isinstance(lesson, str):
        return lessons.load(lesson, fresh=True)
    name = lessons.name_of(lesson)
    if name not in LESSONS and getattr(lesson, "__file__", None) is None:
        return lesson
    fresh = lessons.load(name if name in LESSONS else str(lesson.__file__), fresh=True)
    for name, function in vars(lesson).items():
        if isinstance(function, FunctionType) and _code(function) != _code(getattr(fresh, name, None)):
            setattr(fresh, name, function)
    return fresh


def _code(function: Any) -> Any:
    return getattr(inspect.unwrap(function), "__code__", function) if callable(function) else function


@dataclass
class _Calls:
    """What a step called. own, others: the functions of the lesson, and those of the same name in other modules.
    examples: how many the network computed on each device. labels: how the labels do not match their images."""

    own: set[str] = field(default_factory=set)
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)
    examples: Counter[Context] = field(default_factory=Counter)
    labels: str = ""


class MXNet:
    """The driver. claims of its own are found in sessions that the judge asks for, and by calls of functions alone."""

    unit = "device"

    def __init__(
        self,
        load: Callable[[], ModuleType],
        ctx: list[Context],
        config: Config,
        image_shape: Sequence[int],
        classes: int,
    ) -> None:
        self.load, self.ctx, self.image_shape, self.classes = load, ctx, tuple(image_shape), classes
        lesson = load()
        self.plain = Config(impl=lessons.name_of(lesson), model=config.model)
        self.same = replace(self.plain, zero=config.zero, tune=config.tune, hybridize=config.hybridize)
        lessons.check_settings(self.same, lesson)
        self.calls, self.placed, self.found = _Calls(), "", Claims()

    def batch(self, i: int, n: int) -> Batch:
        rng = np.random.default_rng(i)
        return rng.random((n, *self.image_shape)).astype(np.float32), rng.integers(0, self.classes, n)

    def take(self, batch: Batch, examples: Sequence[int]) -> Batch:
        return batch[0][[*examples]], batch[1][[*examples]]

    def same_labels(self, batch: Batch) -> Batch:
        return batch[0], batch[1][:1].repeat(len(batch[1]))

    def split(self, k: int, batch: Batch, n: int) -> Shards | None:
        shards, wrong = self._split(n)
        return None if wrong else shards

    def model(self, k: int, double: bool = False) -> Any:
        """The model of a fresh lesson on k devices."""
        lesson, ctx = self.load(), self.ctx[:k]
        config = self.same if k > 1 else self.plain
        seed_generators(0)
        model = create_model(lesson, ctx, config, self.image_shape, self.classes)
        if double and type(model) is ArrayModel:
            params = [p.astype("float64") for p in model.device_params[0]]
            model.device_params = [lesson.get_params(params, c) for c in ctx]
        elif double and type(model) is GluonModel:
            model.net.cast("float64")
            model._arrays = [{name: p.data(c) for name, p in model.parameters.items()} for c in ctx]
        elif double:
            raise TypeError("this model computes in float32 only")
        return model

    def run(self, k: int, batches: Sequence[Batch], **options: Any) -> Session:
        session, calls = Session(), _Calls()
        try:
            self._take_steps(session, calls, k, batches, **options)
        except Exception as error:
            if isinstance(error, UsageError) and k == 1:
                raise
            session.failure = _explained(error, calls)
        return session

    def _take_steps(
        self,
        session: Session,
        calls: _Calls,
        k: int,
        batches: Sequence[Batch],
        *,
        double: bool = False,
        shards: Sequence[Shards] | None = None,
        seed: int = 0,
        lr: float = LR,
        **_: Any,
    ) -> None:
        model, dtype = self.model(k, double), "float64" if double else "float32"
        stats = [*model.running_stats]
        session.facts = {"normalized": bool(stats), "statistics": stats, "synced": True}
        session.start = _arrays(model)
        if k > 1 and not double:
            self.placed = self.placed or self._misplaced(model)
        _load(model, spread(session.start[0]), double)
        for i, (X, y) in enumerate(batches):
            seed_generators(1000 * seed + i)
            before, calls.examples = _arrays(model), Counter()
            with _watched(model.lesson, calls, shards[i] if shards and k == 1 else ()):
                losses = model.step(nd.array(X, dtype=dtype), nd.array(y, dtype=dtype), lr)
                nd.waitall()
            after = _arrays(model)
            if not calls.examples:  # the network was called by another name
                calls.examples.update({shard.context: shard.size for shard in losses})
            changes = [{n: a - old[n] for n, a in new.items()} for old, new in zip(before, after)]
            grads = [{n: g.asnumpy().astype(np.float64) for n, g in model.grads(j).items()} for j in range(k)]
            session.steps.append(Step(changes, [], [shard.asnumpy().reshape(-1) for shard in losses]))
            if k > 1:
                self.calls, self.grads_differ = calls, bool(judge.differ(grads))
            if i == 0 and (wrong := not_finite(session.steps[0])):
                raise FloatingPointError(wrong)

    def claims(self, report: Report) -> Claims:
        """The claims of the judge, and those of the lesson's functions, most likely cause first."""
        found = dict(report.claims)
        if {*found} & judge.NOT_COMPARED:
            return found
        claims: Claims = {"start": found.pop("start", ""), "devices": self.placed or self._idle()}
        failed = found.pop("several", "")
        split = next((wrong for n in (4 * len(self.ctx), 4 * len(self.ctx) + 1) if (wrong := self._split(n)[1])), "")
        claims |= {"called": self._called(), "split": split, **self._sum()}
        if self._is_called("split_and_load") is False:
            claims["split"] = None
        if failed:
            return {**{name: reason for name, reason in claims.items() if reason}, "several": failed}
        own = claims.get("sum")
        claims["losses"] = self._losses() or found.get("losses") or ""
        claims["replicas"] = found.get("replicas") or ""
        if claims["replicas"] and not self.grads_differ:
            advice = "update each replica in the same way"
            claims["replicas"] = f"after a step, the replicas have different parameters, but equal gradients; {advice}"
        missing = found.get("sum") if "sum" not in claims or own is None else ""
        claims["update"] = self.alone or found.get("update") or missing or found.get("devices") or self._late()
        claims["accuracy"] = self._accuracy()
        return claims

    def _misplaced(self, model: Any) -> str:
        """Whether each replica is on its own device."""
        for i, c in enumerate(self.ctx):
            arrays = model.arrays(i).values()
            places = {a.context for a in arrays} | {a.grad.context for a in arrays if a.grad is not None}
            if places != {c}:
                where = ", ".join(sorted(str(place) for place in places - {c}))
                return f"the replica of {c} is on {where}; copy the parameters to each device, as in p.copyto(ctx)"
        return ""

    def _idle(self) -> str:
        """Whether each device computes examples."""
        idle = ", ".join(str(c) for c in self.ctx if not self.calls.examples[c])
        if not idle or not self.calls.examples:
            return ""
        where = ", ".join(str(c) for c in self.calls.examples)
        return f"no examples are computed on {idle}, because all shards are on {where}; put shard i on ctx[i]"

    def _is_called(self, name: str) -> bool:
        """Whether the step calls a function of the lesson, or of another module with the same code."""
        own, other = getattr(self.load(), name, None), self.calls.others.get(name)
        return name in self.calls.own or bool(other and own and _code(own) == _code(other))

    def _called(self) -> str:
        """Whether the step calls the lesson's own functions, and no others with the same names."""
        lesson = self.load()
        for name, other in self.calls.others.items():
            if hasattr(lesson, name) and not self._is_called(name):
                advice = "copy the whole lesson into your file, instead of importing it"
                return f"{name} is not called; the step calls {other.__module__}.{name}; {advice}"
        return ""

    def _split(self, n: int) -> tuple[list[list[int]], str]:
        """The indices of each shard's examples, and whether each example is on exactly one device."""
        usual, lesson = [part.tolist() for part in np.array_split(range(n), len(self.ctx))], self.load()
        if not hasattr(lesson, "split_and_load"):
            return usual, ""
        try:
            for first in (10**7, 10**6):  # of the first batch, nothing may come back in the second
                numbers = nd.arange(first, first + n)
                images = numbers.reshape((n, 1, 1, 1)).broadcast_to((n, *self.image_shape))
                Xs, ys = (lesson.split_and_load(data, self.ctx) for data in (images, numbers))
        except UsageError:
            raise
        except Exception as error:
            return usual, f"split_and_load fails for {n} examples: {_explained(error, _Calls())}"
        if wrong := [X.shape for X in Xs if X.shape[1:] != self.image_shape]:
            return usual, f"split_and_load returns images of shape {wrong[0][1:]}; split along the first axis"
        found = [(X.reshape((X.shape[0], -1))[:, 0].asnumpy() - first).astype(int).tolist() for X in Xs if X.size]
        if any(not (0 <= number < n or 0 <= number + first - 10**7 < n) for number in sum(found, [])):
            return usual, "split_and_load changes the images; leave each as it is"
        if found != [(y.asnumpy() - first).astype(int).tolist() for y in ys if y.size]:
            return usual, "split_and_load splits images and labels differently; give each image its own label"
        split = judge.split(found, n)
        return (usual if split else found), split

    def _sum(self) -> Claims:
        """Whether `allreduce` leaves the sum in the arrays of each device, also if it is called again. What it does to
        the array of a single device is wrong for any step."""
        self.alone, lesson = "", self.load()
        if not hasattr(lesson, "allreduce"):
            return {}
        if not self._is_called("allreduce"):
            return {"sum": None}
        rng, found, names = np.random.default_rng(1), [], [str(c) for c in self.ctx]
        size = max(a.size for a in self.model(1).arrays().values())
        for ctx in (self.ctx, self.ctx, self.ctx[:1], self.ctx[:1]):
            values = rng.normal(size=(len(ctx), 7, size // 7 + 1)).astype(np.float32)
            arrays = [nd.array(value, ctx=c) for value, c in zip(values, ctx)]
            given = list(arrays)
            try:
                returned = lesson.allreduce(given) or arrays
            except Exception:  # it may know only the shapes of the parameters; the steps have tried these
                return {"sum": None}
            results = [np.stack([a.asnumpy() for a in some]) for some in (arrays, given, returned)]
            found.append([reduced(values, result, names) for result in results])
        (first, in_list, in_returned), again, *alone = found
        if (again[0] and not first) or (all(alone[1]) and not all(alone[0])):
            self.alone = "allreduce adds what an earlier call left; start each sum from 0"
        elif all(alone[0]):
            self.alone = first or "with one device, allreduce changes the gradients; leave a single array unchanged"
        if first and not in_list:
            first = "allreduce puts the sum into the list, not into the caller's arrays; use d[:] = total"
        return {"sum": self.alone or (first if in_returned else "")}

    def _losses(self) -> str:
        """Whether a step returns a loss for each example, computed before the update from this example alone."""
        n, k = len(self.ctx) * 4, len(self.ctx)
        batch = self.batch(0, n)
        sessions = [self.run(count, [batch], lr=lr) for count, lr in ((1, LR), (1, LR * 1e-6), (k, LR))]
        whole, still, several = (np.concatenate(s.steps[0].losses) if s.steps else np.zeros(0) for s in sessions)
        if not len(whole) == len(several) == n:
            return f"a step on {n} examples returns {several.size} losses; return one for each example"
        if not judge.alike(whole, still):
            return "losses are computed with parameters that this step has changed; update last"
        turned = self.run(1, [self.take(batch, range(n)[::-1])])
        if not judge.alike(whole, np.concatenate(turned.steps[0].losses)):
            return "the losses are not those of the batch; compute each as on one device, with its own image and label"
        alone = [self.run(1, [self.take(batch, shard)]) for shard in self._split(n)[0]]
        by_shard = np.concatenate([loss for s in alone for loss in s.steps[0].losses])
        if sessions[0].fact("normalized") or judge.alike(several, whole):
            return ""
        if judge.alike(several, by_shard):
            return (
                "losses depend on the shard's other examples, as with statistics (mean, variance) of a shard; use "
                "constants"
            )
        factor = several.sum() / whole.sum()
        if judge.alike(several, whole * factor):
            return f"the losses are {factor:.4g} times those of one device; do not scale them by the number of devices"
        return "the losses are not those of the batch; compute each as on one device, with its own image and label"

    def _late(self) -> str:
        """Whether a step uses the gradients of its own batch. What a step does may depend on earlier batches, too, as
        with momentum."""
        first, second, other = (self.batch(i, 4) for i in range(3))
        sessions = [self.run(1, [first, batch]) for batch in (second, other)]
        changes = [s.steps[1].changes[0] for s in sessions if len(s.steps) > 1]
        moves = len(changes) == 2 and any(change.any() for change in changes[0].values())
        return "a step uses the gradients of an earlier batch; update with those of its own" * (
            moves and not judge.differ(changes)
        )

    def _accuracy(self) -> str:
        """Whether `evaluate_accuracy` counts each example once."""
        one, several, k, rng = self.model(1), self.model(len(self.ctx)), len(self.ctx), np.random.default_rng(0)
        if not hasattr(several.lesson, "evaluate_accuracy"):
            return ""
        start, batches = spread(_arrays(one)[0]), []
        for model in (one, several):
            _load(model, start, False)
        for n in (3 * k + 2, 2 * k + 1):
            X = nd.array(rng.random((n, *self.image_shape)))
            scores = one.predict(X.as_in_context(self.ctx[0])).asnumpy()[:, : self.classes]
            second, best = scores.argsort(axis=1).T[-2:]
            wrong = (np.arange(n) > 0) & (np.arange(n) < n - 2)  # three of each batch are right
            batches.append((X, nd.array(np.where(wrong, second, best))))
        expected = 3 * len(batches) / sum(len(y) for _, y in batches)
        try:
            accuracy = float(several.evaluate_accuracy(iter(batches)))
        except UsageError:
            raise
        except Exception as error:
            return f"evaluate_accuracy fails: {_explained(error, _Calls())}"
        if abs(accuracy - expected) < 1e-6:
            return ""
        return f"evaluate_accuracy returns {accuracy:.4f} instead of {expected:.4f}; count each example once"


def spread(arrays: Arrays) -> Arrays:
    """Parameters that are larger than a lesson's, from which each example has its own loss and gradient."""
    rng, found = np.random.default_rng(0), {}
    for name, a in arrays.items():
        found[name] = rng.normal(0, (2 / np.prod(a.shape[1:])) ** 0.5, a.shape) if a.ndim > 1 else a
        found[name] = found[name].astype(np.float32)
    return found


def _arrays(model: Any) -> list[Arrays]:
    nd.waitall()
    return [{n: a.astype(np.float64) for n, a in read_arrays(model, i).items()} for i in range(len(model.ctx))]


def _load(model: Any, start: Arrays, double: bool) -> None:
    if not double:
        return model.load(start)
    for i in range(len(model.ctx)):
        for name, array in model.arrays(i).items():
            nd.array(start[name], dtype="float64").copyto(array)


def not_finite(step: Step) -> str:
    """Whether all numbers are finite."""
    arrays = {"losses": np.concatenate(step.losses), **step.changes[0]}
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if not wrong:
        return ""
    value = "nan" if np.isnan(arrays[wrong[0]]).any() else "infinite"
    where = "losses" if wrong[0] == "losses" else f"gradients ({', '.join(wrong[:4])})"
    return f"the {where} of a step are {value}; look for log(0), division by 0, or overflow"


def reduced(values: np.ndarray, results: np.ndarray, names: Sequence[str], function: str = "allreduce") -> str:
    """Whether each device has the sum. values, results (k, ...): what device i had before and after."""
    k, total = len(values), values.sum(0)
    right, mean, first, unchanged = (
        np.isclose(results, value, rtol=1e-5, atol=1e-5) for value in (total, values.mean(0), values[0], values)
    )
    if right.all():
        return ""
    if unchanged.all():
        return f"{function} does not change the arrays; write the sum into them, as in d[:] = total"
    if mean.all():
        return f"{function} divides the sum by {k}, the number of devices; divide once, by the size of the batch"
    if first.all():
        return f"{function} copies the first device's array to the others, without adding theirs"
    error = np.abs(results - total).max() / np.abs(total).max()
    if error < 0.02:
        bits = round(-np.log2(error))
        like = "as with float16 or 8-bit numbers; keep float32 until the sum is complete"
        return f"{function} leaves a sum with only about {bits} correct bits, {like}"
    if all(part.any() and not part.all() for part in right):
        return f"{function} sums only a part of the array: {right[0].sum()} of {right[0].size} elements"
    wrong = [i for i in range(k) if not right[i].all()]
    weights = [judge.fitted(results[i], [*values], 1e-4 * judge.norm(results[i])) for i in wrong]
    left = [judge.weighted_names(found, names) for found in weights]
    if not all(left):
        return f"{function} leaves no sum on {', '.join(names[i] for i in wrong)}"
    if len({*left}) == 1:
        return f"{function} leaves {left[0]} on {', '.join(names[i] for i in wrong)}, not the sum"
    return f"{function} leaves {', '.join(f'{sum} on {names[i]}' for i, sum in zip(wrong, left))}, not the sum"


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
