"""Connects lessons to the training engine: `train` trains with `scratch`, `highlevel`, `sharded` or your own file.

Your own file is a module with the functions of `scratch` or of `highlevel`. `ArrayReplicas` and `GluonReplicas` contain
what these two do differently; `Replicas` in `training.replicas` does the rest through the lesson's functions.
`ShardedReplicas` calls a whole step of `sharded`.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, nd
from mxnet.ndarray import NDArray

from gluon_mgpu import TRAINABLE, highlevel, networks, scratch, sharded
from gluon_mgpu.data.datasets import IMAGE_SHAPE, Dataset
from gluon_mgpu.distributed import process
from gluon_mgpu.distributed.workers import ALONE, Workers
from gluon_mgpu.runtime import errors, log
from gluon_mgpu.runtime.errors import Error, UsageError, reason, setting
from gluon_mgpu.training import loop, records, tuning
from gluon_mgpu.training.options import NOT_KEPT
from gluon_mgpu.training.replicas import LENET, RUNNING_STATS, VELOCITY, Replicas
from gluon_mgpu.training.settings import DEFAULTS, OPTIONS, PLAIN, Settings, takes

# The functions that scratch, highlevel and copies of them have, and those that only one of the two has.
COMMON = ("lenet", "split_and_load", "forward_backward", "train_batch", "evaluate_accuracy")
LESSONS = {"scratch": scratch, "highlevel": highlevel, "sharded": sharded}
OWN = {scratch: ("init_params", "get_params", "allreduce", "sgd"), highlevel: ("initialize",)}


@takes(Settings)
def train(given: dict[str, Any]) -> list[records.Epoch]:
    """Train, and print the same lines as the notebook. Returns one `records.Epoch` per epoch.

    Arguments: the fields of `Settings`. impl can also be a lesson from `load`, and dataset can be your own arrays:
    `datasets.own(train_images, train_labels, test_images, test_labels)`. With resume, the run continues with its
    recorded settings, except for those that are passed.
    Raises UsageError for invalid arguments, Error if a loss or a parameter is not finite, and KeyboardInterrupt on
    Ctrl-C, once the step is complete and the checkpoint is saved.
    """
    own_lesson = given["impl"] if isinstance(given.get("impl"), ModuleType) else None
    if own_lesson:
        given["impl"] = name_of(own_lesson)
    arrays = given["dataset"] if isinstance(given.get("dataset"), Dataset) else None
    if arrays:
        given["dataset"] = arrays.name

    here = process.current()
    settings = records.starting_settings(given, here)
    lesson = own_lesson or load(settings.impl)
    # If only worker 0 has the folder of a resumed run, the other workers do not know its lesson yet.
    is_known = here.rank == 0 or settings.resume is None or "impl" in given
    for name in kind(lesson).unused if is_known else ():
        if given.get(name, DEFAULTS[name]) != DEFAULTS[name]:
            other = "sharded" if name == "zero" else "highlevel"
            raise UsageError(name, given[name], f"needs {setting('impl', other)}")

    def build(ctx: list[Context], agreed: Settings, *more: Any) -> Replicas:
        made = replicas(lesson if agreed.impl == settings.impl else agreed.impl, ctx, agreed, *more)
        if made.lesson not in LESSONS.values():
            _say_what_is_not_called(made)
        return made

    return loop.train(given, settings, build, arrays)


def replicas(
    impl: str | ModuleType,
    ctx: list[Context],
    settings: Settings = PLAIN,
    workers: Workers = ALONE,
    image_shape: Sequence[int] = IMAGE_SHAPE,
) -> Replicas:
    """Create replicas of a lesson's network on the devices in ctx, with new parameters. impl: a lesson, or its name or
    path, as in `load`. image_shape: (channels, height, width)."""
    lesson = impl if isinstance(impl, ModuleType) else load(impl)
    return kind(lesson)(lesson, ctx, settings, workers, image_shape)


def load(impl: str, **functions: Callable[..., Any]) -> ModuleType:
    """Load a lesson: "scratch", "highlevel", "sharded", or the path of a file with the functions of scratch or
    highlevel.

    functions: replacements for some functions of scratch or highlevel, such as allreduce=tree; they apply to a new copy
    of the lesson. Raises UsageError if the file does not exist, or if a function is missing or has other arguments; an
    error in the file's own code is not caught.
    """
    if impl in LESSONS and not functions:
        return LESSONS[impl]
    path = str(LESSONS[impl].__file__) if impl in LESSONS else str(impl)
    name = f"{impl} (own {', '.join(functions)})" if functions else path
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise UsageError("impl", impl, f"must be one of {', '.join(TRAINABLE)}, or a Python file (.py) that exists")
    lesson = importlib.util.module_from_spec(spec)
    errors.user_files.add(str(spec.origin))
    sys.modules[name] = lesson  # as an import would do; dataclasses need it
    spec.loader.exec_module(lesson)
    for function in functions:
        if not callable(getattr(lesson, function, None)):
            raise UsageError(function, None, f"{impl} has no function with this name")
    vars(lesson).update(functions)
    _check(lesson)
    return lesson


def reference(lesson: ModuleType) -> ModuleType:
    """This package's lesson, scratch or highlevel, that has the same functions as `lesson`."""
    for of_package, names in OWN.items():
        if hasattr(lesson, names[0]):
            return of_package
    advice = "defines neither init_params, as scratch.py does, nor initialize, as highlevel.py does"
    raise UsageError("impl", name_of(lesson), advice)


def kind(lesson: ModuleType) -> type[Replicas]:
    """The class of a lesson's replicas."""
    if lesson is sharded:
        return ShardedReplicas
    return ArrayReplicas if reference(lesson) is scratch else GluonReplicas


def name_of(lesson: ModuleType) -> str:
    """The name of a lesson as in --impl: "scratch", "highlevel" or a path."""
    return lesson.__name__.removeprefix("gluon_mgpu.")


def _check(lesson: ModuleType) -> None:
    """Raise UsageError if a lesson's function is missing, or takes other arguments than in this package's lesson."""
    like = reference(lesson)
    for name in COMMON + OWN[like]:
        parameters = inspect.signature(getattr(like, name)).parameters.values()
        needed = [p.name for p in parameters if p.default is p.empty]
        function = getattr(lesson, name, None)
        if not callable(function):
            raise UsageError("impl", name_of(lesson), f"the function {name}({', '.join(needed)}) is missing")
        found = inspect.signature(function)
        try:
            found.bind(*needed)
        except TypeError:
            advice = f"{name}({', '.join(found.parameters)}) must take ({', '.join(needed)})"
            raise UsageError("impl", name_of(lesson), advice) from None


def _say_what_is_not_called(made: Replicas) -> None:
    """Say which functions of a user's own lesson these settings replace or do not call."""
    settings = made.settings
    skipped = ["split_and_load"] if settings.shares else []
    if isinstance(made, ArrayReplicas) and (settings.momentum or settings.weight_decay):
        skipped.append("sgd")
    if isinstance(made, GluonReplicas) and settings.model != "lenet":
        skipped.append("lenet")
    if made.extras:
        skipped.append("train_batch")
    if skipped:
        log.say(f"with these settings, a step does not call your own {', '.join(skipped)} in {name_of(made.lesson)}")


def _array_names(count: int) -> Sequence[str]:
    """The checkpoint names of the arrays in a lesson's own network, in the order of the layers."""
    return LENET if count == len(LENET) else [f"p{i}" for i in range(count)]


def _gluon_names(network: networks.Network, params: Sequence[str], is_lessons_own: bool) -> Sequence[str]:
    """The checkpoint names of a Gluon network's arrays. params: Gluon's names. is_lessons_own: whether the network is
    the lesson's `lenet`; its names are then those of `scratch`, unless it has running statistics, which `scratch`
    lacks."""
    if not is_lessons_own:
        return network.names or params
    return params if any(name.endswith(RUNNING_STATS) for name in params) else _array_names(len(params))


class ArrayReplicas(Replicas):
    """Replicas of a lesson like `scratch`: the model is one list of arrays per device, and the rule is the learning
    rate."""

    unused = ("hybridize", "tune", "zero")

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        lesson, settings = self.lesson, self.settings
        if settings.model != "lenet":
            advice = f"{name_of(lesson)} trains only its own lenet; use {setting('impl', 'highlevel')}"
            raise UsageError("model", settings.model, advice)
        params = lesson.init_params()
        self.model = [lesson.get_params(params, c) for c in self.ctx]
        self.arrays = [dict(zip(_array_names(len(params)), params)) for params in self.model]
        like = self.model if settings.momentum else [[] for _ in self.ctx]
        self._velocities = [[nd.zeros_like(p) for p in params] for params in like]
        if settings.grad_accum_steps > 1:
            for params in self.model:
                for p in params:
                    p.attach_grad("add")

    @property
    def extras(self) -> bool:
        return bool(super().extras or self.settings.momentum or self.settings.weight_decay)

    def rule(self, lr: float) -> float:
        return lr

    def allreduce(self) -> None:
        for i in range(len(self.model[0])):
            self.lesson.allreduce([params[i].grad for params in self.model])

    def update(self, lr: float, batch_size: int) -> None:
        """Call the lesson's sgd or, with momentum v or weight decay, compute v = momentum * v - lr * (gradient /
        batch_size + weight_decay * p), then p += v."""
        s = self.settings
        for params, velocities in zip(self.model, self._velocities):
            if not (s.momentum or s.weight_decay):
                self.lesson.sgd(params, lr, batch_size)
                continue
            rule = {"lr": lr, "rescale_grad": 1 / batch_size, "wd": s.weight_decay}
            for i, p in enumerate(params):
                if s.momentum:
                    nd.sgd_mom_update(p, p.grad, velocities[i], out=p, momentum=s.momentum, **rule)
                else:
                    nd.sgd_update(p, p.grad, out=p, **rule)

    def predict(self, X: NDArray) -> NDArray:
        return self.lesson.lenet(X, self.model[self.ctx.index(X.context)])

    def velocities(self, device: int) -> dict[str, NDArray]:
        return dict(zip(self.arrays[device], self._velocities[device]))


class GluonReplicas(Replicas):
    """Replicas of a lesson like `highlevel`: the model is a Block, and the rule is a Trainer. `net` is the network as
    written; `model` is an equivalent network that may run faster: see `tuning`."""

    unused = ("zero",)

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        settings = self.settings
        if settings.model not in networks.NETWORKS:
            known = ", ".join(networks.NETWORKS)
            raise UsageError("model", settings.model, f"must be one of {known}, or registered: see networks.register")
        network = networks.NETWORKS[settings.model]
        own = settings.model == "lenet"  # the lesson's own network, with the lesson's own initializer
        self.net = self.lesson.lenet() if own else network.build()
        takes_shape = "image_shape" in inspect.signature(self.lesson.initialize).parameters
        shape = {"image_shape": self.image_shape} if takes_shape else {}
        try:
            self.lesson.initialize(self.net, self.ctx, *([] if own else [network.init]), **shape)
        except (mx.MXNetError, ValueError) as error:
            raise self.unfit(f"does not accept images of shape {self.image_shape} ({reason(error)})") from None
        loss = getattr(self.lesson, "loss", None)  # as one graph, it runs faster than as five separate operators
        for block in (self.net, loss):
            if isinstance(block, gluon.Block):
                block.hybridize(settings.hybridize, static_alloc=True, static_shape=True)
        self.model = self._tuned()
        params = self.net._collect_params_with_prefix()
        names = _gluon_names(network, [*params], own)
        if len(names) != len(params):
            advice = f"registered with {len(names)} names, but the network has {len(params)} arrays"
            raise UsageError("model", settings.model, advice)
        named = dict(zip(names, params.values()))
        trained = [p for p in named.values() if p.grad_req != "null"]
        if settings.grad_accum_steps > 1:
            for p in trained:
                p.grad_req = "add"
        self.arrays = [{name: p.data(c) for name, p in named.items()} for c in self.ctx]
        rule = {"learning_rate": settings.peak_lr, "momentum": settings.momentum, "wd": settings.weight_decay}
        if settings.tune and self.ctx[0].device_type == "cpu":
            self.trainer = tuning.Trainer(trained, rule)
        else:  # with update_on_kvstore, one device would compute the updates of all replicas, unlike in the lesson
            self.trainer = gluon.Trainer(trained, "sgd", rule, kvstore="device", update_on_kvstore=False)
        if settings.momentum:  # Trainer itself would create the velocities only in the first step
            for c, updater in zip(self.ctx, self.trainer._updaters):
                updater.states = {i: nd.zeros_like(p.data(c)) for i, p in enumerate(trained)}
                updater.states_synced = dict.fromkeys(updater.states, True)

    def _tuned(self) -> gluon.Block:
        """The network to train. With several workers, unless the run has recorded a plan, this is the network as
        written: padding and pieces would delay the gradients, which are summed over the workers during the backward
        pass."""
        tune = self.settings.tune
        if not (tune and self.settings.hybridize and tuning.tunable(self.net, self.ctx)):
            return self.net
        if isinstance(tune, tuple):
            return tuning.tuned(self.net, *tune)
        return tuning.tuned(self.net) if tuning.has_avx512() and self.workers.count == 1 else self.net

    def rule(self, lr: float) -> gluon.Trainer:
        self.trainer.set_learning_rate(lr)
        return self.trainer

    def allreduce(self) -> None:
        self.trainer.allreduce_grads()

    def update(self, lr: float, batch_size: int) -> None:
        self.rule(lr).update(batch_size)

    def predict(self, X: NDArray) -> NDArray:
        return self.model(X)

    def velocities(self, device: int) -> dict[str, NDArray]:
        if not self.settings.momentum:
            return {}
        return dict(zip(self.grads()[device], self.trainer._updaters[device].states.values()))


class ShardedReplicas(Replicas):
    """LeNet, trained with `sharded`: the model is a `sharded.State`, and the rule is an optimizer. Its checkpoints are
    those of `scratch`."""

    unused = ("hybridize", "tune")
    supported = (
        *("impl", "num_gpus", "device", "batch_size", "lr", "epochs", "seed", "dataset", "limit", "momentum", "zero"),
        *("scale_lr", "schedule", "milestones", "gamma", "warmup_epochs"),
    )
    steps = (sharded.ddp, sharded.zero1, sharded.zero2, sharded.zero3)

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for name, declared in OPTIONS.items():
            value = getattr(self.settings, name)
            if declared.on_resume != NOT_KEPT and name not in self.supported + self.unused and value != DEFAULTS[name]:
                raise UsageError(name, value, f"not supported by {setting('impl', 'sharded')}")
        if self.workers.count > 1:
            raise UsageError("kvstore", self.settings.kvstore, f"not supported by {setting('impl', 'sharded')}")
        self.smallest_batch = len(self.ctx)
        params = scratch.init_params()
        self._place(params, [nd.zeros_like(p) for p in params])

    def _place(self, params: list[NDArray], velocities: list[NDArray]) -> None:
        parts = ((params, self.settings.zero == 3), (velocities, self.settings.zero > 0))
        self.model = [sharded.place(sharded.LENET, arrays, self.ctx, is_sharded) for arrays, is_sharded in parts]

    def train_batch(self, X: NDArray | None, y: NDArray | None, lr: float, batch_size: int = 0) -> list[NDArray]:
        return self.steps[self.settings.zero](X, y, sharded.LENET, self.model, self.ctx, self.rule(lr))

    def rule(self, lr: float) -> sharded.Optimizer:
        return partial(sharded.sgd, lr=lr, momentum=self.settings.momentum)

    @property
    def arrays(self) -> list[dict[str, NDArray]]:  # type: ignore[override]
        """The whole parameters on each device. With ZeRO-3, these are copies."""
        layers = [
            sharded.unshard(b, shapes) if self.settings.zero == 3 else [sharded.unbucket(v, shapes) for v in b]
            for (_, shapes), b in zip(sharded.LENET, self.model[0])
        ]
        return [dict(zip(LENET, [p for layer in layers for p in layer[i]])) for i in range(len(self.ctx))]

    def velocities(self, device: int) -> dict[str, NDArray]:
        if not self.settings.momentum:
            return {}
        return dict(zip(LENET, sharded.collect(sharded.LENET, self.model[1], self.settings.zero > 0)))

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        params = {name: nd.array(state[name]) for name in LENET if name in state}
        velocities = [nd.array(state.get(VELOCITY + name, np.zeros(p.shape))) for name, p in params.items()]
        if {name: p.shape for name, p in params.items()} != {name: p.shape for name, p in self.arrays[0].items()}:
            raise Error("the checkpoint holds the parameters of a different network")
        self._place(list(params.values()), velocities)

    def evaluate_accuracy(self, data_iter: Iterable[tuple[NDArray, NDArray]]) -> float:
        arrays = [list(of_device.values()) for of_device in self.arrays]  # with ZeRO-3, gathered only once
        return scratch.evaluate_accuracy(
            data_iter, lambda X: scratch.lenet(X, arrays[self.ctx.index(X.context)]), self.ctx
        )

    def predict(self, X: NDArray) -> NDArray:
        return scratch.lenet(X, list(self.arrays[self.ctx.index(X.context)].values()))
