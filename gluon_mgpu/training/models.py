"""What the training loop knows of a lesson: a `Model`. An ArrayModel calls the functions of scratch or of a copy of it,
a GluonModel those of highlevel. `create_model` chooses one of them."""

from __future__ import annotations

import inspect
import io
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, autograd, gluon, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.compat import startup
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.support.errors import Error, UsageError, reason
from gluon_mgpu.training import lessons, registry, tuning
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.lessons import Lesson
from gluon_mgpu.training.registry import LENET_NAMES
from gluon_mgpu.training.workers import Group

VELOCITY = "velocity/"  # in checkpoints, the name of a velocity is this prefix and the parameter's name
LENET_DIMENSIONS = [4, 1, 4, 1, 2, 1, 2, 1]  # of LeNet's arrays
RUNNING_STATS = ("running_mean", "running_var")  # suffixes of Gluon's names of batch normalization's statistics


class Model(ABC):
    """A network with a replica on each device in ctx, trained with the functions of a lesson."""

    running_stats: Sequence[str] = ()  # names of the running statistics of batch normalization in `arrays`

    def __init__(self, lesson: Lesson, ctx: list[Context], config: Config, image_shape: Sequence[int]) -> None:
        self.lesson, self.lesson_name = lesson.module, lesson.name
        self.ctx, self.config, self.image_shape = ctx, config, tuple(image_shape)
        if config.shares and len(config.shares) != len(ctx):
            raise UsageError("shares", config.shares, f"needs one number for each device, and there are {len(ctx)}")

    @abstractmethod
    def step(self, X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        """Run the lesson's `train_batch` on images X (n, *image_shape) and labels y (n,). Returns each shard's losses,
        without waiting for them."""

    @abstractmethod
    def predict(self, X: NDArray) -> NDArray:
        """Compute the scores (n, classes) of images X (n, *image_shape) on X's device, without waiting for them."""

    @abstractmethod
    def arrays(self, device: int = 0) -> dict[str, NDArray]:
        """The arrays of one device: parameters, running statistics, and velocities (with momentum)."""

    @abstractmethod
    def export(self, prefix: str) -> None:
        """Write PREFIX-symbol.json and PREFIX-0000.params, as HybridBlock.export does. Raises UsageError if the network
        has no graph."""

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Set all replicas. arrays: as in `arrays`. Raises Error if their names or shapes do not match this network."""
        arrays = self._with_todays_names(arrays)
        self._check_match(arrays)
        for device in range(len(self.ctx)):
            for name, array in self.arrays(device).items():
                nd.array(arrays[name]).copyto(array)  # array[:] fails on weights in a oneDNN layout

    def _with_todays_names(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Earlier versions named the arrays of any network of eight arrays as LeNet's."""
        names = [name for name in self.arrays() if not name.startswith(VELOCITY)]
        if len(names) != len(LENET_NAMES) or not arrays.keys() >= {*LENET_NAMES}:
            return arrays
        now = dict(zip(LENET_NAMES, names))
        now |= {VELOCITY + name: VELOCITY + other for name, other in now.items()}
        return {now.get(name, name): array for name, array in arrays.items()}

    def _check_match(self, arrays: dict[str, np.ndarray]) -> None:
        ours, others = ({name: array.shape for name, array in found.items()} for found in (self.arrays(), arrays))
        if ours != others:
            (name, shape), *_ = sorted({*ours.items()} ^ {*others.items()})
            which = "only the checkpoint has" if others.get(name) == shape else "the checkpoint lacks"
            raise Error(f"the checkpoint is from a different network or lesson: {which} {name} {shape}")

    def check_scores(self, classes: int, exactly: bool = False) -> None:
        """Raise UsageError unless the network has a score for each class. exactly: whether more are an error, too."""
        try:
            scores = self.predict(nd.zeros((1, *self.image_shape), ctx=self.ctx[0])).shape
        except (mx.MXNetError, ValueError, AssertionError) as error:
            raise self._unfit(f"does not accept images of shape {self.image_shape} ({reason(error)})") from None
        if scores[:1] != (1,) or len(scores) != 2 or scores[1] < classes or (exactly and scores[1] > classes):
            raise self._unfit(f"returns scores of shape {scores} for one image, but needs (1, {classes})")

    def _unfit(self, why: str) -> UsageError:
        """The error for a network that does not fit the data."""
        if self.config.model != "lenet":
            return UsageError("model", self.config.model, f"the network {why}")
        hint = "copy scratch.py or highlevel.py, change its network, and pass your file"
        return UsageError("impl", self.config.impl, f"the network {why}; {hint}")

    def evaluate_accuracy(self, data_iter: Iterable[tuple[NDArray, NDArray]]) -> float:
        accuracy = self.lesson.evaluate_accuracy(data_iter, self.predict, self.ctx)
        if not (isinstance(accuracy, Real) and 0 <= float(accuracy) <= 1):
            raise self.wrong("evaluate_accuracy", accuracy, "a number from 0 to 1")
        return float(accuracy)

    # The parts of a step, which `step.assemble` puts together

    @abstractmethod
    def forward_backward(self, Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
        """Compute the gradients of each shard on its device. Returns the losses of each shard."""

    @abstractmethod
    def allreduce(self) -> None:
        """Sum the gradients over the devices of this process."""

    @abstractmethod
    def update(self, lr: float, batch_size: int) -> None:
        """Update each replica with its gradients, which are sums over batch_size examples."""

    def split_and_load(self, data: NDArray) -> list[NDArray]:
        """Split a batch into one shard per device."""
        return self._call("split_and_load", data, self.ctx)

    def _call(self, function: str, *args: Any) -> list[NDArray]:
        """Call a function of the lesson. Raises UsageError if it returns anything but a list of NDArrays."""
        arrays = getattr(self.lesson, function)(*args)
        if not isinstance(arrays, (list, tuple)) or not all(isinstance(array, NDArray) for array in arrays):
            raise self.wrong(function, arrays, "a list of NDArrays")
        return arrays  # type: ignore[return-value]

    def wrong(self, function: str, returned: object, right: str) -> UsageError:
        """The error for a function of the lesson that returns something wrong."""
        advice = "add its return statement" if returned is None else f"it must return {right}"
        return UsageError("impl", self.lesson_name, f"{function} returned {returned!r:.60}; {advice}")

    def grads(self, device: int = 0) -> dict[str, NDArray]:
        """The gradients on one device, by the names of their parameters."""
        return {name: array.grad for name, array in self.arrays(device).items() if array.grad is not None}

    def average_running_stats(self, losses: list[NDArray], examples: int, group: Group, fraction: float = 1.0) -> None:
        """Average batch normalization's running statistics over the devices and workers, weighted by the number of
        examples, so that all replicas give the same result in an evaluation.

        losses: of each shard. examples: their number. fraction: this worker's fraction of the whole batch.
        """
        ctx, names = self.ctx, self.running_stats
        if not names or len(ctx) * group.size == 1:
            return
        arrays = [self.arrays(i) for i in range(len(ctx))]
        weighted = []
        for i, c in enumerate(ctx):
            weight = sum(shard.shape[0] for shard in losses if shard.context == c) / examples
            # A hybridized network's backward pass writes the statistics without telling the engine. Reading an element
            # of the gradient that is computed last makes the engine wait for the whole backward pass.
            last = next(iter(self.grads(i).values())).reshape(-1)[:1]
            weighted.append(nd.concat(*[arrays[i][name] for name in names], last, dim=0) * weight)
        average = nd.add_n(*[x.as_in_context(ctx[0]) for x in weighted])
        if group.size > 1:
            average = nd.array(group.all_reduce((average * fraction).asnumpy()))
        for i, c in enumerate(ctx):
            on_device, start = average.as_in_context(c), 0
            for name in names:
                size = arrays[i][name].shape[0]
                on_device[start : start + size].copyto(arrays[i][name])
                start += size


class ArrayModel(Model):
    """device_params: one list of parameters per device, as in `scratch`."""

    def __init__(self, lesson: Lesson, ctx: list[Context], config: Config, image_shape: Sequence[int]) -> None:
        super().__init__(lesson, ctx, config, image_shape)
        params = self._call("init_params")
        self.device_params = [self._call("get_params", params, c) for c in self.ctx]
        self.names = _array_names([param.ndim for param in params])

    def step(self, X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        return self._call("train_batch", X, y, self.device_params, self.ctx, lr)

    def predict(self, X: NDArray) -> NDArray:
        scores = self.lesson.lenet(X, self.device_params[self.ctx.index(X.context)])
        if not isinstance(scores, NDArray):
            raise self.wrong("lenet", scores, "an NDArray of scores")
        return scores

    def arrays(self, device: int = 0) -> dict[str, NDArray]:
        return dict(zip(self.names, self.device_params[device]))

    def forward_backward(self, Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
        return self._call("forward_backward", self.device_params, Xs, ys)

    def allreduce(self) -> None:
        for i in range(len(self.names)):
            self.lesson.allreduce([params[i].grad for params in self.device_params])

    def update(self, lr: float, batch_size: int) -> None:
        for params in self.device_params:
            self.lesson.sgd(params, lr, batch_size)

    def export(self, prefix: str) -> None:
        _export(prefix, self.lesson.lenet, dict(zip(self.names, self.device_params[0])), self.image_shape)


class GluonModel(Model):
    """lesson_net: the network as the lesson writes it, with all its replicas. net: the network that computes, which is
    the same one, except with `--tune`. trainer: a gluon.Trainer, which sums the gradients and updates."""

    def __init__(self, lesson: Lesson, ctx: list[Context], config: Config, image_shape: Sequence[int]) -> None:
        super().__init__(lesson, ctx, config, image_shape)
        self.network = registry.get(config.model)
        self.lesson_net = self.net = self._create_net()
        if config.tune:
            self.net = self._tuned()
        params = self._params()
        self.parameters = dict(zip(self._names(params), params.values()))
        self.running_stats = [name for name, p in zip(self.parameters, params) if p.endswith(RUNNING_STATS)]
        trained = {name: p for name, p in self.parameters.items() if p.grad_req != "null"}
        rule = {"learning_rate": config.lr, "momentum": config.momentum, "wd": config.weight_decay}
        # With update_on_kvstore, one device would compute the updates of all replicas, unlike in the lesson.
        self.trainer = gluon.Trainer([*trained.values()], "sgd", rule, kvstore="device", update_on_kvstore=False)
        self._arrays = [{name: p.data(c) for name, p in self.parameters.items()} for c in ctx]
        if config.momentum:  # Trainer itself would create the velocities only in the first step
            for updater, arrays in zip(self.trainer._updaters, self._arrays):
                updater.states = {i: nd.zeros_like(arrays[name]) for i, name in enumerate(trained)}
                updater.states_synced = dict.fromkeys(updater.states, True)
                arrays.update({VELOCITY + name: updater.states[i] for i, name in enumerate(trained)})

    def _create_net(self) -> gluon.Block:
        """The lesson's network, or a registered one, initialized on all devices."""
        network, initialize = self.network, self.lesson.initialize
        with mx.name.NameManager():  # counts layers from 0, whatever was built before
            net = network.build() if network else self.lesson.lenet()
        if net is None:
            raise self.wrong("lenet", net, "a network")
        if network is None or network.init is None:
            initialize(net, self.ctx)
        elif "init" in inspect.signature(initialize).parameters:
            initialize(net, self.ctx, init=network.init)
        else:
            advice = f"needs an initializer of its own, but initialize in {self.lesson_name} has no argument init"
            raise UsageError("model", self.config.model, advice)
        net.hybridize(self.config.hybridize, static_alloc=True, static_shape=True)
        try:
            with redirect_stdout(io.StringIO()):  # if shapes do not fit, MXNet prints its arguments
                if not all({*self.ctx} <= {*p.list_ctx()} for p in net.collect_params().values()):
                    advice = "initialize must put the parameters on all devices: net.initialize(init, ctx=ctx)"
                    raise UsageError("impl", self.lesson_name, advice)
                for c in self.ctx:  # creates the parameters; if only one device did this, the others would be slower
                    net(nd.zeros((1, *self.image_shape), ctx=c))
        except (mx.MXNetError, RuntimeError, ValueError) as error:
            raise self._unfit(f"does not accept images of shape {self.image_shape} ({reason(error)})") from None
        return net

    def _tuned(self) -> gluon.Block:
        if self.ctx[0].device_type != "cpu" or mx.__version__ >= "2":
            advice = f"needs CPU contexts and MXNet 1.9.1, not {self.ctx[0]} and {mx.__version__}"
            raise UsageError("tune", True, advice)
        net = tuning.tuned(self.lesson_net)
        net.hybridize(self.config.hybridize, static_alloc=True, static_shape=True)
        return net

    def _params(self) -> dict[str, gluon.Parameter]:
        """The network's parameters by Gluon's names, each once, even if several layers share it."""
        names: dict[gluon.Parameter, str] = {}
        for name, parameter in self.lesson_net._collect_params_with_prefix().items():
            names.setdefault(parameter, name)
        return {name: parameter for parameter, name in names.items()}

    def _names(self, params: dict[str, gluon.Parameter]) -> Sequence[str]:
        """The names of the network's arrays in checkpoints: Gluon's or, for what scratch can train too, scratch's."""
        network, names = self.network, [*params]
        if network is None:
            if any(name.endswith(RUNNING_STATS) for name in names):
                return names
            return _array_names([len(p.shape) for p in params.values()])
        if network.names and len(network.names) != len(names):
            advice = f"registered with {len(network.names)} names, but the network has {len(names)} arrays"
            raise UsageError("model", self.config.model, advice)
        return network.names or names

    def step(self, X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        self.trainer.set_learning_rate(lr)
        losses = self._call("train_batch", X, y, self.net, self.ctx, self.trainer)
        self.average_running_stats(losses, X.shape[0], Group())
        return losses

    def predict(self, X: NDArray) -> NDArray:
        return self.net(X)

    def arrays(self, device: int = 0) -> dict[str, NDArray]:
        return self._arrays[device]

    def forward_backward(self, Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
        return self._call("forward_backward", self.net, Xs, ys)

    def allreduce(self) -> None:
        self.trainer.allreduce_grads()

    def update(self, lr: float, batch_size: int) -> None:
        self.trainer.set_learning_rate(lr)
        self.trainer.update(batch_size)

    def export(self, prefix: str) -> None:
        if not isinstance(self.lesson_net, gluon.HybridBlock):
            raise UsageError("model", self.config.model, "not a HybridBlock, so it has no graph to convert")
        self.lesson_net.hybridize()
        self.lesson_net(nd.zeros((1, *self.image_shape), ctx=self.ctx[0]))  # export needs a graph
        self.lesson_net.export(prefix)


MODELS: dict[str, type[Model]] = {"scratch": ArrayModel, "highlevel": GluonModel}


def create_model(
    impl: str | ModuleType,
    ctx: list[Context],
    config: Config | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
) -> Model:
    """Create the model of a lesson on the devices in ctx, with new parameters.

    impl: a lesson, or its name or path, as in `lessons.load`. config: default: plain SGD, as in the notebooks.
    image_shape: (channels, height, width). classes: number of classes; the network may have more scores.
    Raises UsageError if the settings, the devices, the network and the data do not fit together.
    """
    startup.check_contexts(ctx)
    lesson = lessons.describe(impl if isinstance(impl, ModuleType) else lessons.load(impl))
    config = config or Config(impl=lesson.name)
    lesson.check_settings(config)
    model = MODELS[lesson.family](lesson, ctx, config, image_shape)
    model.check_scores(classes)
    return model


def read_arrays(model: Any, device: int = 0) -> dict[str, np.ndarray]:
    """Read the arrays of a model, or of another object with a method `arrays`, on one device. See `Model.arrays`."""
    nd.waitall()  # a forward pass that is still running may change the layout of weights
    return {name: array.asnumpy() for name, array in model.arrays(device).items()}


def _array_names(dimensions: list[int]) -> Sequence[str]:
    """The checkpoint names of the arrays in a lesson's own network, in the order of the layers. dimensions: of each
    array. The arrays of networks like LeNet have the same names in all lessons."""
    return LENET_NAMES if dimensions == LENET_DIMENSIONS else [f"p{i}" for i in range(len(dimensions))]


def _export(prefix: str, lenet: Any, arrays: dict[str, NDArray], image_shape: Sequence[int]) -> None:
    """Write the graph and the parameters of a network of arrays. lenet(X, params): returns its scores."""
    # MXNet names each array that a gradient is attached to; the graph of array * 1 contains only this name.
    inputs = {
        **{name: nd.array(array.asnumpy()) for name, array in arrays.items()},
        "data": nd.zeros((1, *image_shape)),
    }
    for array in inputs.values():
        array.attach_grad()
    with autograd.record(train_mode=False):
        recorded = {name: array * 1 for name, array in inputs.items()}
        scores = lenet(inputs["data"], [inputs[name] for name in arrays])
    names = {autograd.get_symbol(r).list_arguments()[0]: name for name, r in recorded.items()}
    graph, counts = json.loads(autograd.get_symbol(scores).tojson()), Counter[str]()
    for node in graph["nodes"]:
        op = {"Convolution": "conv", "FullyConnected": "dense"}.get(node["op"], node["op"].strip("_").lower())
        node["name"] = names.get(node["name"], f"{op}{counts[op]}")  # such as conv0, as in Gluon
        counts[op] += 1
    Path(f"{prefix}-symbol.json").write_text(json.dumps(graph))
    nd.save(f"{prefix}-0000.params", {f"arg:{name}": inputs[name] for name in arrays})
