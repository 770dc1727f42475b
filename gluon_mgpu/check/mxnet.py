"""Takes a lesson's steps on several devices and on one, each time with a fresh execution of its file.

`MXNet.checks` adds to the judge's claims what only a lesson's own functions can tell: on which devices they compute,
and what `split_and_load`, `allreduce` and `evaluate_accuracy` do when they are called alone.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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
import gluon_mgpu.check.reached as reached
from gluon_mgpu.check.accuracy import accuracy
from gluon_mgpu.check.arrays import ROUNDING, equal_losses, fitted_weights, is_same, listed, norm, only
from gluon_mgpu.check.driver import AS_WRITTEN, Arrays, Claim, Driver, Facts, Options, Session, Shards, StepResult
from gluon_mgpu.check.driver import changes as changes_of
from gluon_mgpu.check.evidence import usual_parts
from gluon_mgpu.check.judge import Report
from gluon_mgpu.check.kept import kept
from gluon_mgpu.check.processes import where
from gluon_mgpu.check.trainer import own_trainer
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import lessons
from gluon_mgpu.training.config import LESSONS, Config
from gluon_mgpu.training.models import RUNNING_STATS, ArrayModel, GluonModel, create_model, read_arrays
from gluon_mgpu.training.seeds import restored_afterward, seed_generators
from gluon_mgpu.training.watch import code_of, noting_calls
from gluon_mgpu.training.workers import Group

LR = 0.7  # not 1, so that a power of it is another number
STEPS = 2
CREATE = ("zeros", "ones", "full", "array", "arange", "linspace", "eye", "one_hot")
DRAW = ("normal", "uniform", "randn")
STRESS = {
    "with larger inputs": Options(scale=100.0),
    "if one device gets numbers that are not finite": Options(scale=math.nan),
}
CAST = ("cast", "Cast", "amp_cast")
SUM, UPDATE = gluon.Trainer._allreduce_grads.__code__, gluon.Trainer._update.__code__


def compare_lesson(
    lesson: ModuleType | str,
    ctx: list[Context],
    config: Config | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
    steps: int = STEPS,
    even: bool = False,
    numbers: Sequence[int] = (),
    own_trainer: bool = True,
) -> Report:
    """Take steps with a lesson's `train_batch` on several devices and on ctx[0], and check what a step must do.

    lesson: a lesson, its name or path. ctx: at least two devices. config: only its network, and how the network is
    computed, are used. image_shape, classes: see `create_model`. numbers: how many of the devices to compare, one
    number after the other; default: all of them. own_trainer: step with the gluon.Trainer that the lesson's `train`
    creates, instead of that of `gluon-mgpu train`.
    """
    if len(ctx) < 2:
        raise UsageError("gpus", len(ctx), "the comparison with one device needs at least 2 devices")
    load = functools.partial(fresh_copy, lesson)
    with restored_afterward():
        driver = MXNet(load, ctx, config or Config(), image_shape, classes, own_trainer, even)
        return judge.compare(driver, numbers or [len(ctx)], steps, even)


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


def _codes(function: Any) -> list[Any]:
    """The code of a function and of those that it wraps, without the wrapper of `lessons.load`; the type of any other
    object."""
    codes = [getattr(function, "__code__", type(function))]
    if hasattr(function, "__wrapped__"):
        codes += _codes(function.__wrapped__)
    return [code for code in codes if getattr(code, "co_filename", "") != lessons.__file__]


class MXNet(Driver):
    """The driver. ctx: the most devices. extra: how many examples make a batch uneven; 0: all batches are even. called:
    what the steps have called. examples: how many a step on several had on each device. hints: what is odd about it.
    placed: what is wrong with the places of the replicas. done: what has run of the file's functions. shapes: of the
    parameters of networks other than the model's.
    """

    divides = "split_and_load"
    advice = {
        **Driver.advice,
        "not summed": "sum them in place, before the update (a gluon.Trainer with kvstore=None sums nothing)",
        "left": "write them (grad_req='write'), or call zero_grad after each update",
    }

    def __init__(
        self,
        load: Callable[[], ModuleType],
        ctx: list[Context],
        config: Config,
        image_shape: Sequence[int],
        classes: int,
        own_trainer: bool,
        even: bool,
    ) -> None:
        self.load, self.ctx, self.image_shape, self.classes = load, ctx, tuple(image_shape), classes
        self.own_trainer, self.done, self.extra = own_trainer, reached.Done(), int(not even)
        lesson = load()
        self.as_written = Config(impl=lessons.name_of(lesson), model=config.model)
        self.as_trained = replace(self.as_written, tune=config.tune, hybridize=config.hybridize)
        lessons.describe(lesson).check_settings(self.as_trained)
        self.called, self.examples, self.hints, self.placed = set[CodeType](), Counter[Context](), list[str](), ""
        self.shapes: dict[str, tuple[int, ...]] | None = None

    def split(self, k: int, batch: Any, n: int) -> Shards | None:
        lesson = self.load()
        if not self._is_called(lesson.split_and_load):
            return None
        try:
            for first in (10**7, 10**6):  # of the first batch, nothing may come back in the second
                shards = _divided(lesson, nd.arange(first, first + n), self.ctx[:k], first)
        except Exception:  # the step fails, too
            return None
        return shards

    def _divided_alike(self, k: int) -> str:
        """Whether `split_and_load` divides images as it divides labels."""
        lesson, n = self.load(), -(-judge.EXAMPLES // k) * k + self.extra
        if not self._is_called(lesson.split_and_load):
            return ""
        for count in (1, k):
            numbers = nd.arange(1, n + 1)
            images = nd.ones((n, *self.image_shape)) * numbers.reshape((-1, *[1] * len(self.image_shape)))
            try:
                pairs = zip(*(sum(_divided(lesson, data, self.ctx[:count], 1), []) for data in (images, numbers)))
            except Exception as error:
                return f"split_and_load fails for {n} images or labels: {where(error)}"
            if wrong := next((f"image {image} gets label {label}" for image, label in pairs if image != label), ""):
                advice = "divide images and labels in the same way"
                return f"split_and_load changes their order: {wrong} on {count} {log.plural(count, 'device')}; {advice}"
        return ""

    def model(self, k: int, double: bool = False, hybridize: bool = True) -> Any:
        """The model of a fresh lesson on k devices. hybridize: False: its network is computed operator by operator, not
        as one graph."""
        lesson, ctx = self.load(), self.ctx[:k]
        config = self.as_trained if k > 1 else self.as_written
        if not hybridize:
            config = replace(self.as_written, hybridize=False)
        seed_generators(0)
        model = create_model(lesson, ctx, config, self.image_shape, self.classes)
        if double and isinstance(model, ArrayModel):
            params = [p.astype("float64") for p in model.device_params[0]]
            with _in_double(Facts()):  # it may create other arrays, too
                model.device_params = [lesson.get_params(params, c) for c in ctx]
        elif double and isinstance(model, GluonModel):
            model.net.cast("float64")
            model._arrays = [{name: p.data(c) for name, p in model.parameters.items()} for c in ctx]
        return model

    def run(
        self,
        k: int,
        batches: Sequence[Any],
        options: Options = AS_WRITTEN,
        lr: float = LR,
        hybridize: bool = True,
    ) -> Session:
        session = Session()
        try:
            with _without_dropout(session.facts):
                model = self.model(k, options.double, hybridize)
                with _in_double(session.facts) if options.double else nullcontext():
                    self._take_steps(session, model, batches, options, lr)
        except Exception as error:
            if isinstance(error, UsageError) and k == 1:
                raise
            session.failure = where(error)
        return session

    def _take_steps(self, session: Session, model: Any, batches: Sequence[Any], options: Options, lr: float) -> None:
        dtype, is_several = "float64" if options.double else "float32", len(model.ctx) > 1
        data = [(nd.array(_scaled(X, options.scale), dtype=dtype), nd.array(y, dtype=dtype)) for X, y in batches]
        if isinstance(model, GluonModel):
            model.net.apply(_refuse_synchronized)
        self._prepare(model, data[0], lr, session.facts, options.double)
        session.facts.statistics = session.facts.synced = [*model.running_stats]
        session.facts.normalized = bool(model.running_stats)
        net, trainer = getattr(model, "net", None), getattr(model, "trainer", None)
        compression = getattr(trainer, "_compression_params", None)
        if compression and options.double:
            raise Error("MXNet compresses gradients only in float32")
        rest = functools.partial(kept, model.lesson, model.ctx, net=net, trainer=trainer)
        written, session.kept = _arrays(model), rest()
        own = getattr(model, "parameters", written[0])  # without those of other networks
        given = {**written[0], **spread({name: a for name, a in written[0].items() if name in own})}
        # what differs between devices, or from one device, still does
        session.start = [{name: given[name] + (a - written[0][name]) for name, a in of.items()} for of in written]
        session.facts.params = [name for name in given if name not in model.running_stats]
        if is_several and not options.double:
            self.placed = self._misplaced(model)
        model.load(given)
        grads = _noted_gradients(model) if trainer else []
        allreduce = code_of(getattr(model.lesson, "allreduce", None))
        calls = Counter(dict.fromkeys((allreduce, SUM, UPDATE), 0))
        for i, (X, y) in enumerate(data):
            seed_generators(1000 * options.seed + i)
            before, examples = _arrays(model), Counter[Context]()
            if options.shards and not is_several:
                model.net = _ByShard(net, options.shards[i])
            with self._watched(model.lesson, examples, calls), reached.traced(self.done):
                losses = self._step(model, X, y, lr)
                nd.waitall()
            statistics = only(_arrays(model), model.running_stats)
            model.average_running_stats(losses, X.shape[0], Group())
            step = StepResult(changes_of(before, _arrays(model)), losses=[a.asnumpy().reshape(-1) for a in losses])
            step.statistics = statistics
            step.rates = [{"lr 0": float(trainer.learning_rate)}] * len(model.ctx) if trainer else []
            step.grads = [{n: np.stack(of_steps) for n, of_steps in g.items()} for g in grads]
            step.rest = rest()
            session.steps.append(step)
            grads.clear()
            if is_several:
                self.examples = examples or Counter({shard.context: shard.size for shard in losses})
                sums, of_trainer, updates = (count / (i + 1) for count in calls.values())
                self.hints = _hints(sums, len(before[0]), of_trainer, updates)
                if compression:
                    self.hints.append("the Trainer compresses gradients (compression_params)")

    @contextmanager
    def _watched(self, lesson: ModuleType, examples: Counter[Context], calls: Counter[Any]) -> Iterator[None]:
        """Note what a step calls, and how many examples are computed on each device. calls: counts the calls of the
        functions that it has, except those that they make of themselves."""
        computes = code_of(lesson.forward_backward)

        def note(frame: FrameType) -> None:
            self.called.add(frame.f_code)
            if frame.f_code in calls and not _is_recursive(frame):
                calls[frame.f_code] += 1
            if frame.f_code == computes and computes.co_argcount > 1:
                shards = frame.f_locals[computes.co_varnames[1]]
                for shard in shards if isinstance(shards, (list, tuple)) else ():
                    examples[shard.context] += shard.shape[0]

        with noting_calls(note):
            yield

    def _prepare(self, model: Any, batch: Any, lr: float, facts: Facts, double: bool) -> None:
        """Give a model the Trainer of its lesson, and the arrays of other networks. double: these get float64."""
        if not isinstance(model, GluonModel):
            return
        if reason := self._set_trainer(model, lr, batch):
            facts.how = [f"with the gluon.Trainer of `gluon-mgpu train`, because {reason}"]
        others = _of_other_networks(model)
        if any(p._deferred_init for p in others.values()):
            self._infer_shapes(others, batch)
        if double:
            _cast_other_networks(model)
        found = {name: p for name, p in others.items() if p._data and {*model.ctx} <= {*p.list_ctx()}}
        # average_running_stats needs the network's own first, whose gradients are computed last
        parameters = {**model.parameters, **found, **model.parameters}
        model._arrays = [{name: p.data(c) for name, p in parameters.items()} for c in model.ctx]

    def _set_trainer(self, model: GluonModel, lr: float, batch: Any) -> str:
        """Give a model the Trainer of its lesson, with this learning rate. Returns why it does not, if so."""
        model.trainer.set_learning_rate(lr)
        if self.own_trainer:
            try:
                model.trainer = own_trainer(model, lr, batch)
            except Error as error:
                return str(error)
        return ""

    def _infer_shapes(self, parameters: Mapping[str, gluon.Parameter], batch: Any) -> None:
        """Create the parameters that Gluon creates only in the first step, with the shapes that they have after a step
        of a fresh lesson."""
        if self.shapes is None:
            model, (X, y) = self.model(1), batch
            self._set_trainer(model, LR, batch)
            self._step(model, X, y, LR)
            self.shapes = {name: p.shape for name, p in _of_other_networks(model).items() if p._data}
        seed_generators(0)
        for name, p in parameters.items():
            if name in self.shapes:
                p.shape = self.shapes[name]
                p._finish_deferred_init()

    @staticmethod
    def _step(model: Any, X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        """A step of the model, but the Trainer keeps its learning rate."""
        if not isinstance(model, GluonModel):
            return model.step(X, y, lr)
        return model.lesson.train_batch(X, y, model.net, model.ctx, model.trainer)

    def missed(self) -> list[str]:
        return reached.missed(self.done)

    def begins(self, k: int, batches: Sequence[Any], options: Options) -> str:
        return "".join(f"; {hint}" for hint in self.hints)

    def stress(self) -> Mapping[str, Options]:
        return STRESS

    def checks(self, k: int, is_wrong: bool, note: Callable[[str], None]) -> Iterator[Claim]:
        yield "devices", self.placed or self._idle(k) or self._divided_alike(k)
        yield "called", self._not_called()
        if not is_wrong:
            yield "update", self._statistics(k)
            yield "losses", self._losses(k, max(4 * k, judge.EXAMPLES), note)
            yield "update", self._changed_alone()
            yield "accuracy", self._accuracy(k)

    def _misplaced(self, model: Any) -> str:
        """Whether each replica is on its own device."""
        for i, c in enumerate(model.ctx):
            arrays = model.arrays(i).values()
            places = {a.context for a in arrays} | {a.grad.context for a in arrays if a.grad is not None}
            if places != {c}:
                others = ", ".join(sorted(str(place) for place in places - {c}))
                return f"the replica of {c} is on {others}; copy the parameters to each device, as in p.copyto(ctx)"
        return ""

    def _idle(self, k: int) -> str:
        """Whether each device computes examples."""
        idle = ", ".join(str(c) for c in self.ctx[:k] if not self.examples[c])
        if not idle or not self.examples:
            return ""
        used = ", ".join(str(c) for c in self.examples)
        return f"no examples are computed on {idle}, because all shards are on {used}; put shard i on ctx[i]"

    def _is_called(self, function: Any) -> bool:
        """Whether a step has called a function, or another one with the same code."""
        return code_of(function) in self.called

    def _not_called(self) -> str:
        """Whether the step calls the lesson's own functions, and no others with the same names."""
        lesson = self.load()
        for name in (*lessons.COMMON, "allreduce", "sgd"):
            others = [code for code in self.called if code.co_name == name]
            if hasattr(lesson, name) and others and not self._is_called(getattr(lesson, name)):
                other = Path(others[0].co_filename).stem
                advice = "copy the whole lesson into your file, instead of importing it"
                return f"{name} is not called; the step calls {other}.{name}; {advice}"
        return ""

    def _losses(self, k: int, n: int, note: Callable[[str], None]) -> str:
        """Whether a step returns a loss for each example, computed before the update."""
        batch = self.batch(0, n)
        sessions = [self.run(count, [batch], lr=lr) for count, lr in ((1, LR), (1, LR * 1e-6), (k, LR))]
        if failures := [session.failure for session in sessions if session.failure]:
            return f"a step on {n} examples fails: {failures[0]}"
        one, still, several = (np.concatenate(session.steps[0].losses) for session in sessions)
        if not len(one) == len(several) == n:
            return f"a step on {n} examples returns {several.size} losses; return one for each example"
        if not equal_losses(one, still):
            return "losses are computed with parameters that this step has changed; update last"
        halves = [self.run(1, [self.take(batch, range(i, n, 2))]) for i in (0, 1)]
        if not sessions[0].facts.normalized and all(half.steps for half in halves):
            of_halves = [losses for half in halves for losses in half.steps[0].losses]
            alone, found = np.sort(np.concatenate(of_halves)), np.sort(one)
            if fitted_weights(found, [alone], 1e-3 * norm(found)) is None:
                note(
                    "warning: an example's loss depends on the other examples of the batch; if the network does not "
                    "mix examples, look for labels of other images"
                )
        return ""

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

    def _statistics(self, k: int) -> str:
        """Whether the running statistics that a step leaves on each device are those of one device's examples, or an
        average."""
        if not self.model(k).running_stats:
            return ""
        n = -(-judge.EXAMPLES // k) * k
        batch = self.batch(0, n)
        parts = usual_parts(self.split(k, batch, n), k, n)
        data = [(k, batch), (1, batch), *((1, self.take(batch, part)) for part in parts)]
        # A hybridized network's backward pass writes the statistics without telling the engine.
        several, *alone = (self.run(count, [examples], hybridize=False).steps for count, examples in data)
        if not several or not all(alone):
            return ""
        wrong = list[str]()
        for name in several[0].statistics[0]:
            whole, *of_parts = (steps[0].statistics[0][name] for steps in alone)
            right = [*of_parts, np.mean(of_parts, axis=0), whole]  # the whole batch's, if it is synchronized
            found = [arrays[name] for arrays in several[0].statistics]
            if not all(any(is_same(a, b, 1e-4 * norm(b)) for b in right) for a in found):
                wrong.append(name)
        reason = f"the running statistics ({listed(wrong)}) are neither those of a device's examples nor an average of "
        return reason + "these; average them over the devices, or leave them as they are" if wrong else ""

    def _accuracy(self, k: int) -> str:
        rng = np.random.default_rng(0)
        one, several = self.model(1), self.model(k)
        start = spread(_arrays(one)[0])
        for model in (one, several):
            model.load(start)
        parts = [nd.array(rng.random((n, *self.image_shape))) for n in (3 * k + 2 * self.extra, 2 * k + self.extra)]
        net = lambda X: one.predict(X.as_in_context(self.ctx[0]))[:, : self.classes].asnumpy()  # noqa: E731
        return accuracy(lambda batches: several.evaluate_accuracy(iter(batches)), net, parts, nd.array)


def _scaled(X: np.ndarray, scale: float) -> np.ndarray:
    """Images times a number or, if it is not finite, with this number as the last one."""
    return X * np.float32(scale) if np.isfinite(scale) else np.concatenate([X[:-1], np.full_like(X[-1:], scale)])


def spread(arrays: Arrays) -> Arrays:
    """Parameters that are larger than a lesson's, from which each example has its own loss and gradient."""
    rng, found = np.random.default_rng(0), {}
    for name, a in arrays.items():
        found[name] = a + rng.normal(0, (2 / np.prod(a.shape[1:])) ** 0.5, a.shape) if a.ndim > 1 else a
        found[name] = found[name].astype(np.float32)
    return found


def _arrays(model: Any) -> list[Arrays]:
    return [{n: a.astype(np.float64) for n, a in read_arrays(model, i).items()} for i in range(len(model.ctx))]


def _divided(lesson: ModuleType, data: NDArray, ctx: list[Context], first: int) -> list[list[int]]:
    """The indices of the examples of each shard of a batch. data: an example's number in each of its elements. first:
    that of the first."""
    shards = [shard.asnumpy() for shard in lesson.split_and_load(data, ctx)]
    return [(shard.reshape(len(shard), -1)[:, 0] - first).astype(int).tolist() for shard in shards if shard.size]


def _is_recursive(frame: FrameType) -> bool:
    """Whether a function is called by itself, also indirectly."""
    caller = frame.f_back
    while caller and caller.f_code != frame.f_code:
        caller = caller.f_back
    return caller is not None


def _hints(sums: float, arrays: int, of_trainer: float, updates: float) -> list[str]:
    """What may be wrong with sums in a step on several devices. sums: how often it calls allreduce, for how many
    arrays. of_trainer: how often the Trainer sums all gradients, for how many updates."""
    hints = list[str]()
    if sums > arrays:
        hints.append(f"a step calls allreduce {sums:g} times, for {arrays} arrays: sum each once")
    if of_trainer > updates > 0:
        often = f"{of_trainer / updates:g} times for each update"
        hints.append(f"the Trainer sums gradients {often}: sum once, before it")
    return hints


def _refuse_synchronized(block: gluon.Block) -> None:
    """Raise Error for SyncBatchNorm: on one device, it would wait for the others forever."""
    if isinstance(block, gluon.contrib.nn.SyncBatchNorm):
        raise Error("SyncBatchNorm waits for a fixed number of devices; check the step with BatchNorm in its place")


def _other_networks(model: GluonModel) -> dict[str, gluon.Block]:
    """The networks in the file's variables, such as a critic."""
    return {name: block for name, block in vars(model.lesson).items() if isinstance(block, gluon.Block)}


def _of_other_networks(model: GluonModel) -> dict[str, gluon.Parameter]:
    """Their parameters, without those of the model and running statistics."""
    known, found = {*model.parameters.values()}, dict[str, gluon.Parameter]()
    for name, block in _other_networks(model).items():
        found |= {f"{name}.{key}": p for key, p in block._collect_params_with_prefix().items() if p not in known}
    return {name: p for name, p in found.items() if not name.endswith(RUNNING_STATS)}


def _cast_other_networks(model: GluonModel) -> None:
    """Cast them to float64, unless they were initialized within `_in_double`. This makes new arrays."""
    for block in _other_networks(model).values():
        if any(a.dtype != np.float64 for p in block.collect_params().values() for a in p._data or ()):
            block.cast("float64")


def _noted_gradients(model: GluonModel) -> list[dict[str, list[np.ndarray]]]:
    """The gradients on each device of which the Trainer makes updates, if the devices compute them."""
    update, grads = model.trainer._update, list[dict[str, list[np.ndarray]]]()

    def noted(*args: Any, **options: Any) -> None:
        if not model.trainer._update_on_kvstore:
            nd.waitall()
            trained = {name: p for name, p in model.parameters.items() if p.grad_req != "null"}
            grads.extend({name: [] for name in trained} for _ in model.ctx[len(grads) :])
            for c, of_device in zip(model.ctx, grads):
                for name, p in trained.items():
                    of_device[name].append(p.grad(c).asnumpy().astype(np.float64))
        update(*args, **options)

    model.trainer._update = noted
    return grads


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
def _in_double(facts: Facts) -> Iterator[None]:
    """Let new arrays be float64 where MXNet's default is float32, or where float32 or less is asked for. Random numbers
    are drawn in float32, so that they are the same. facts: gets the lowest precision that is asked for."""

    def larger(dtype: Any) -> Any:
        name = "float32" if dtype is None else str(getattr(dtype, "__name__", dtype))
        low = next((low for low in reversed(ROUNDING) if low in name), "")  # bfloat16 before float16
        facts.low = max(facts.low, low or "float32", key=ROUNDING.__getitem__)
        return "float64" if low else dtype

    def typed(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def in_double(*args: Any, **options: Any) -> Any:
            bound = signature.bind_partial(*args, **options)
            bound.arguments["dtype"] = larger(bound.arguments.get("dtype"))
            return function(*bound.args, **bound.kwargs)

        return in_double

    def drawn(draw: Callable[..., Any]) -> Callable[..., Any]:
        def in_float32(*args: Any, **options: Any) -> Any:
            out = options.get("out")
            if out is not None and out.dtype == np.float64:
                options["out"] = nd.empty(out.shape, out.context, "float32")
                draw(*args, **options).copyto(out)
                return out
            array = draw(*args, **options)
            return array.astype("float64") if array.dtype == np.float32 and out is None else array

        return in_float32

    with ExitStack() as stack:
        for owner, names, change in (
            (nd, CREATE, typed),
            (mx.optimizer.optimizer, ("zeros",), typed),
            (nd.random, DRAW, drawn),
            (mx.random, DRAW, drawn),
            (nd, CAST, typed),
            (NDArray, ("astype",), typed),
        ):
            for name in names:
                stack.enter_context(patch.object(owner, name, change(getattr(owner, name))))
        yield


@contextmanager
def _without_dropout(facts: Facts) -> Iterator[None]:
    """Let dropout keep all values, and say so."""

    def keeping(dropout: Callable[..., Any]) -> Callable[..., Any]:
        def keep(data: Any, p: float = 0.5, *others: Any, **options: Any) -> Any:
            if p > 0:
                facts.how = ["with dropout off"]
            return dropout(data, 0, *others, **options)

        return keep

    with (
        patch.object(nd, "Dropout", keeping(nd.Dropout)),
        patch.object(mx.sym, "Dropout", keeping(mx.sym.Dropout)),
        patch.object(mx.npx, "dropout", keeping(mx.npx.dropout)),
    ):
        yield
