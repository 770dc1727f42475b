"""Takes a lesson's steps on several devices and on one, each time with a fresh execution of its file.

`MXNet.checks` adds to the judge's claims what only a lesson's own functions can tell: on which devices they compute,
and what `split_and_load`, `allreduce` and `evaluate_accuracy` do when they are called alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest.mock import patch

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, nd
from mxnet.ndarray import NDArray

import gluon_mgpu.check.judge as judge
from gluon_mgpu.check.accuracy import accuracy
from gluon_mgpu.check.judge import Arrays, Claim, Driver, Report, Session, Shards
from gluon_mgpu.check.processes import where
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.training import lessons
from gluon_mgpu.training.config import LESSONS, Config
from gluon_mgpu.training.model import read_arrays
from gluon_mgpu.training.models import ArrayModel, GluonModel, create_model
from gluon_mgpu.training.seeds import restored_afterward, seed_generators

FUNCTIONS = ("train_batch", "split_and_load", "forward_backward", "allreduce", "sgd", "lenet")
LR = 0.7  # not 1, so that a power of it is another number
STEPS = 2


def compare(
    lesson: ModuleType | str,
    ctx: list[Context],
    config: Config | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
    steps: int = STEPS,
    even: bool = False,
) -> Report:
    """Take steps with a lesson's `train_batch` on ctx and on ctx[0], and check what a step must do.

    lesson: a lesson, its name or path. ctx: at least two devices. config: only its network, and how the network is
    computed, are used. image_shape, classes: see `create_model`.
    """
    if len(ctx) < 2:
        raise UsageError("gpus", len(ctx), "the comparison with one device needs at least 2 devices")
    load = functools.partial(fresh_copy, lesson)
    with restored_afterward():
        return judge.compare(MXNet(load, ctx, config or Config(), image_shape, classes), [len(ctx)], steps, even)


def fresh_copy(lesson: ModuleType | str) -> ModuleType:
    """A fresh execution of a lesson's file, with the functions that were replaced in it. A lesson without a file
    is returned as it is."""
    if isinstance(lesson, str):
        return lessons.load(lesson, fresh=True)
    name = lessons.name_of(lesson)
    if name not in LESSONS and getattr(lesson, "__file__", None) is None:
        return lesson
    fresh = lessons.load(name if name in LESSONS else str(lesson.__file__), fresh=True)
    for name, function in vars(lesson).items():
        if callable(function) and _codes(function) != _codes(getattr(fresh, name, None)):
            setattr(fresh, name, function)
    return fresh


def _code(function: Any) -> CodeType | None:
    """The code of a function, without its decorators."""
    return getattr(inspect.unwrap(function), "__code__", None)


def _codes(function: Any) -> list[Any]:
    """The code of a function and of those that it wraps, without the wrapper of `lessons.load`; the type of any other
    object."""
    codes = [getattr(function, "__code__", type(function))]
    if hasattr(function, "__wrapped__"):
        codes += _codes(function.__wrapped__)
    return [code for code in codes if getattr(code, "co_filename", "") != lessons.__file__]


class MXNet(Driver):
    """The driver. called: what the steps have called. examples: how many the network computed on each device in a step
    on several. placed: what is wrong with the places of the replicas."""

    divides = "split_and_load"

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
        self.as_written = Config(impl=lessons.name_of(lesson), model=config.model)
        self.as_trained = replace(self.as_written, tune=config.tune, hybridize=config.hybridize)
        lessons.describe(lesson).check_settings(self.as_trained)
        self.called, self.examples, self.placed = set[CodeType](), Counter[Context](), ""

    def split(self, k: int, batch: Any, n: int) -> Shards | None:
        lesson = self.load()
        if not self._is_called(lesson.split_and_load):
            return None
        try:
            for first in (10**7, 10**6):  # of the first batch, nothing may come back in the second
                shards = lesson.split_and_load(nd.arange(first, first + n), self.ctx[:k])
        except Exception:  # the step fails, too
            return None
        return [(shard.asnumpy() - first).astype(int).tolist() for shard in shards if shard.size]

    def model(self, k: int, double: bool = False) -> Any:
        """The model of a fresh lesson on k devices."""
        lesson, ctx = self.load(), self.ctx[:k]
        config = self.as_trained if k > 1 else self.as_written
        seed_generators(0)
        model = create_model(lesson, ctx, config, self.image_shape, self.classes)
        if double and isinstance(model, ArrayModel):
            params = [p.astype("float64") for p in model.device_params[0]]
            model.device_params = [lesson.get_params(params, c) for c in ctx]
        elif double and isinstance(model, GluonModel):
            model.net.cast("float64")
            model._arrays = [{name: p.data(c) for name, p in model.parameters.items()} for c in ctx]
        return model

    def run(
        self,
        k: int,
        batches: Sequence[Any],
        double: bool = False,
        shards: Sequence[Shards] | None = None,
        seed: int = 0,
        lr: float = LR,
        **_: Any,
    ) -> Session:
        session, dtype = Session(), "float64" if double else "float32"
        try:
            with _without_dropout(session.facts):
                model = self.model(k, double)
                stats, net = [*model.running_stats], getattr(model, "net", None)
                session.facts |= {"normalized": bool(stats), "statistics": stats, "synced": True}
                session.start = _arrays(model)
                if k > 1 and not double:
                    self.placed = self._misplaced(model)
                model.load(spread(session.start[0]))
                for i, (X, y) in enumerate(batches):
                    seed_generators(1000 * seed + i)
                    before, examples = _arrays(model), Counter[Context]()
                    if shards and k == 1:
                        model.net = _ByShard(net, shards[i])
                    with _watched(model.lesson, net, self.called, examples):
                        losses = model.step(nd.array(X, dtype=dtype), nd.array(y, dtype=dtype), lr)
                    session.add(before, _arrays(model), [shard.asnumpy().reshape(-1) for shard in losses])
                    if k > 1:
                        self.examples = examples or Counter({shard.context: shard.size for shard in losses})
        except Exception as error:
            if isinstance(error, UsageError) and k == 1:
                raise
            session.failure = where(error)
        return session

    def checks(self, k: int, is_wrong: bool) -> Iterator[Claim]:
        lesson = self.load()
        yield "devices", self.placed or self._idle()
        yield "called", self._not_called(lesson)
        if not is_wrong:
            yield "losses", self._losses(max(4 * k, judge.EXAMPLES))
            yield "update", self._changed_alone()
            yield "accuracy", self._accuracy()

    def _misplaced(self, model: Any) -> str:
        """Whether each replica is on its own device."""
        for i, c in enumerate(self.ctx):
            arrays = model.arrays(i).values()
            places = {a.context for a in arrays} | {a.grad.context for a in arrays if a.grad is not None}
            if places != {c}:
                others = ", ".join(sorted(str(place) for place in places - {c}))
                return f"the replica of {c} is on {others}; copy the parameters to each device, as in p.copyto(ctx)"
        return ""

    def _idle(self) -> str:
        """Whether each device computes examples."""
        idle = ", ".join(str(c) for c in self.ctx if not self.examples[c])
        if not idle or not self.examples:
            return ""
        used = ", ".join(str(c) for c in self.examples)
        return f"no examples are computed on {idle}, because all shards are on {used}; put shard i on ctx[i]"

    def _is_called(self, function: Any) -> bool:
        """Whether a step has called a function, or another one with the same code."""
        return _code(function) in self.called

    def _not_called(self, lesson: ModuleType) -> str:
        """Whether the step calls the lesson's own functions, and no others with the same names."""
        for name in FUNCTIONS:
            others = [code for code in self.called if code.co_name == name]
            if hasattr(lesson, name) and others and not self._is_called(getattr(lesson, name)):
                other = Path(others[0].co_filename).stem
                advice = "copy the whole lesson into your file, instead of importing it"
                return f"{name} is not called; the step calls {other}.{name}; {advice}"
        return ""

    def _losses(self, n: int) -> str:
        """Whether a step returns a loss for each example, computed before the update."""
        batch = self.batch(0, n)
        sessions = [self.run(k, [batch], lr=lr) for k, lr in ((1, LR), (1, LR * 1e-6), (len(self.ctx), LR))]
        if failures := [session.failure for session in sessions if session.failure]:
            return f"a step on {n} examples fails: {failures[0]}"
        one, still, several = (np.concatenate(session.steps[0].losses) for session in sessions)
        if not len(one) == len(several) == n:
            return f"a step on {n} examples returns {several.size} losses; return one for each example"
        changed = "losses are computed with parameters that this step has changed; update last"
        return "" if judge.equal_losses(one, still) else changed

    def _changed_alone(self) -> str:
        """Whether `allreduce` leaves the array of a single device as it is, also if it is called again. If not, a step
        on one device is wrong, too."""
        model = self.model(1)  # its lesson may have created what allreduce uses
        if not self._is_called(getattr(model.lesson, "allreduce", None)):
            return ""
        shape, same = max(model.arrays().values(), key=lambda a: a.size).shape, list[bool]()
        for _ in range(2):
            array = nd.random.normal(shape=shape, ctx=self.ctx[0])
            given = array.copy()
            model.lesson.allreduce([array])
            same.append(bool((array == given).min().asscalar()))
        if not same[0]:
            return "with one device, allreduce changes the gradients; leave a single array unchanged"
        return "" if same[1] else "allreduce adds what an earlier call left; start each sum from 0"

    def _accuracy(self) -> str:
        k, rng = len(self.ctx), np.random.default_rng(0)
        one, several = self.model(1), self.model(k)
        start = spread(_arrays(one)[0])
        for model in (one, several):
            model.load(start)
        parts = [nd.array(rng.random((n, *self.image_shape))) for n in (3 * k + 2, 2 * k + 1)]
        net = lambda X: one.predict(X.as_in_context(self.ctx[0]))[:, : self.classes].asnumpy()  # noqa: E731
        return accuracy(lambda batches: several.evaluate_accuracy(iter(batches)), net, parts, nd.array)


def spread(arrays: Arrays) -> Arrays:
    """Parameters that are larger than a lesson's, from which each example has its own loss and gradient."""
    rng, found = np.random.default_rng(0), {}
    for name, a in arrays.items():
        found[name] = rng.normal(0, (2 / np.prod(a.shape[1:])) ** 0.5, a.shape) if a.ndim > 1 else a
        found[name] = found[name].astype(np.float32)
    return found


def _arrays(model: Any) -> list[Arrays]:
    return [{n: a.astype(np.float64) for n, a in read_arrays(model, i).items()} for i in range(len(model.ctx))]


@contextmanager
def _watched(
    lesson: ModuleType, net: gluon.Block | None, called: set[CodeType], examples: Counter[Context]
) -> Iterator[None]:
    """Note what a step calls, and how many examples the network computes on each device."""
    network = _code(lesson.lenet)

    def count(_: Any, inputs: Sequence[NDArray]) -> None:
        examples[inputs[0].context] += inputs[0].shape[0]

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code)
            if frame.f_code == network and frame.f_code.co_argcount:
                count(None, [frame.f_locals[frame.f_code.co_varnames[0]]])

    hook = net.register_forward_pre_hook(count) if net is not None else None
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
        nd.waitall()
    finally:
        sys.setprofile(before)
        if hook:
            hook.detach()


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
def _without_dropout(facts: dict[str, Any]) -> Iterator[None]:
    """Let dropout keep all values, and say so."""

    def keeping(dropout: Callable[..., Any]) -> Callable[..., Any]:
        def keep(data: Any, p: float = 0.5, **options: Any) -> Any:
            if p > 0:
                facts["how"] = ["with dropout off"]
            return dropout(data, p=0, **options)

        return keep

    with (
        patch.object(nd, "Dropout", keeping(nd.Dropout)),
        patch.object(mx.sym, "Dropout", keeping(mx.sym.Dropout)),
        patch.object(mx.npx, "dropout", keeping(mx.npx.dropout)),
    ):
        yield
