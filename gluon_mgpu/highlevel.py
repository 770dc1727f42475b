"""Lesson 2: LeNet and ResNet-18 on several devices with Gluon. Each function has a counterpart in `scratch`.

`initialize` with a list of contexts copies the parameters, `gluon.utils` splits the batch, and `Trainer.step` sums the
gradients and updates every replica. Source: the notebook "Training on multiple GPUs with gluon" (The Straight Dope).
`forward_backward` and `train_batch` keep the notebook's names; the notebook's `run` is called `train` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mxnet as mx
from mxnet import Context, autograd, gluon, nd
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from gluon_mgpu import networks
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import batches, loop, replicas, tuning
from gluon_mgpu.training.plans import DEFAULT, Plan
from gluon_mgpu.training.records import Epoch

loss = gluon.loss.SoftmaxCrossEntropyLoss()
loss.hybridize(static_alloc=True, static_shape=True)  # one graph runs faster than five separate operators


def lenet(pooling: Callable[..., nn.HybridBlock] = nn.AvgPool2D) -> nn.HybridSequential:
    """Build LeNet for images (n, 1, 28, 28), uninitialized. pooling: nn.AvgPool2D as in `scratch`, or nn.MaxPool2D."""
    net = nn.HybridSequential(prefix="cnn_")
    with net.name_scope():
        net.add(nn.Conv2D(channels=20, kernel_size=3, activation="relu"))  # (n, 20, 26, 26)
        net.add(pooling(pool_size=(2, 2), strides=(2, 2)))  # (n, 20, 13, 13)
        net.add(nn.Conv2D(channels=50, kernel_size=5, activation="relu"))  # (n, 50, 9, 9)
        net.add(pooling(pool_size=(2, 2), strides=(2, 2)))  # (n, 50, 4, 4)
        net.add(nn.Flatten())  # (n, 800)
        net.add(nn.Dense(128, activation="relu"))
        net.add(nn.Dense(10))
    return net


networks.register("lenet", lenet, names=replicas.LENET)
networks.register("lenet-max", lambda: lenet(nn.MaxPool2D), mx.init.Uniform(0.07), replicas.LENET)  # as in the notebook


def initialize(
    net: gluon.Block, ctx: list[Context], hybridize: bool = True, init: mx.init.Initializer = networks.NORMAL
) -> None:
    """Put a replica of the network on each device. The weights are drawn once, with init, so all replicas are equal.

    net: a network for images of shape (n, 1, 28, 28). hybridize: run the network as one graph with preallocated memory,
    instead of operator by operator.
    """
    net.initialize(init, ctx=ctx)
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    for c in ctx:  # creates the parameters; later steps were 8% slower if only one device did this (2 cores, AMD EPYC)
        net(nd.zeros((1, 1, 28, 28), ctx=c))


def split_and_load(data: NDArray, ctx: list[Context]) -> list[NDArray]:
    """Split a batch into shards, one per device. With fewer examples than devices, the last devices get no shard."""
    return gluon.utils.split_and_load(data, ctx[: data.shape[0]], even_split=False)


def forward_backward(net: gluon.Block, data: list[NDArray], label: list[NDArray]) -> list[NDArray]:
    """Compute the gradients of each shard on its device. Returns the losses of each shard, one vector per device."""
    with autograd.record():  # the loss is calculated separately on each device
        losses = [loss(net(X), y) for X, y in zip(data, label)]
    for shard_loss in losses:  # backpropagation runs separately on each device
        shard_loss.backward()
    return losses


def train_batch(X: NDArray, y: NDArray, net: gluon.Block, ctx: list[Context], trainer: gluon.Trainer) -> list[NDArray]:
    """Run one training step on images X (n, 1, 28, 28) and labels y (n,), with one replica on each device in ctx.

    Returns the losses of each shard. This function only queues the step, and does not wait for the devices.
    """
    assert X.shape[0] >= len(ctx), "a batch needs at least one example per device"
    data, label = split_and_load(X, ctx), split_and_load(y, ctx)
    losses = forward_backward(net, data, label)
    trainer.step(X.shape[0])  # allreduce, then the same update on each device
    return losses


def evaluate_accuracy(
    data_iter: Iterable[tuple[NDArray, NDArray]], net: Callable[[NDArray], NDArray], ctx: list[Context]
) -> float:
    """Compute the fraction of examples whose label has the highest score. Each device scores its shard of each batch.

    net: a function that computes scores on the device of its input.
    """

    def correct() -> Iterable[list[NDArray]]:
        for X, y in data_iter:
            shards = zip(split_and_load(X, ctx), split_and_load(y, ctx))
            yield [net(X_shard).argmax(axis=1) == y_shard for X_shard, y_shard in shards]

    return batches.mean(correct())


class Replicas(replicas.Replicas):
    """Connects the training loop to the functions above, and holds a network with a replica on each device, and its
    Trainer.

    `net` is the network as written. hybridize: see `initialize`. tune: the plan for a faster equivalent of `net`, which
    is trained instead (see `tuning`); True: choose the plan by measurement; False: train `net` itself.
    """

    own_options = flags = ("hybridize", "tune")

    def __init__(self, *args: Any, hybridize: bool = True, tune: bool | Sequence[int] = True) -> None:
        super().__init__(*args)
        settings = self.settings
        if settings.model not in networks.NETWORKS:  # scratch.train adds unregistered networks to MODELS
            raise UsageError(f"model={settings.model}: not registered; see networks.register")
        network = networks.NETWORKS[settings.model]
        self.net = network.build()
        initialize(self.net, self.ctx, hybridize, network.init)
        plan = self._plan(tune, hybridize and tuning.tunable(self.net, self.ctx)) if tune else None
        self.fast = tuning.tuned(self.net, plan) if plan else self.net
        self.own_config = {"hybridize": hybridize, "tune": plan or tune}
        params = self.net._collect_params_with_prefix()
        named = dict(zip(network.names or params, params.values()))
        self.trained = [p for p in named.values() if p.grad_req != "null"]
        if settings.grad_accum_steps > 1:
            for p in self.trained:
                p.grad_req = "add"
        self.arrays = [{name: p.data(c) for name, p in named.items()} for c in self.ctx]
        rule = {"learning_rate": settings.peak_lr, "momentum": settings.momentum, "wd": settings.weight_decay}
        if tune and self.ctx[0].device_type == "cpu":
            self.trainer = tuning.Trainer(self.trained, rule)
        else:  # with update_on_kvstore, one device would compute the updates of all replicas, unlike in the lesson
            self.trainer = gluon.Trainer(self.trained, "sgd", rule, kvstore="device", update_on_kvstore=False)
        if settings.momentum:  # Trainer itself would create the velocities only in the first step
            for c, updater in zip(self.ctx, self.trainer._updaters):
                updater.states = {i: nd.zeros_like(p.data(c)) for i, p in enumerate(self.trained)}
                updater.states_synced = dict.fromkeys(updater.states, True)

    def _plan(self, tune: bool | Sequence[int], tunable: bool) -> Plan | None:
        """Return worker 0's plan: the plan given as tune. If tune is True, this is the fastest plan or, with several
        workers, DEFAULT. Returns None if the network is not tunable."""
        plan = DEFAULT if tune is True else Plan.create(tune)
        # Padding and pieces delay the gradients, so summing them over the workers would begin later.
        if tune is True and tunable and self.workers.count == 1:
            examples = -(-self.settings.batch_size // (len(self.ctx) * self.settings.grad_accum_steps))
            plan = tuning.choose(self.net, self.settings.model, self.ctx[0], examples, forward_backward)
        plan = self.workers.all_gather(plan)[0]
        return Plan.create(plan) if tunable else None

    def lesson_step(self, X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        self.trainer.set_learning_rate(lr)
        return train_batch(X, y, self.fast, self.ctx, self.trainer)

    def split_and_load(self, data: NDArray) -> list[NDArray]:
        return split_and_load(data, self.ctx)

    def forward_backward(self, Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
        return forward_backward(self.fast, Xs, ys)

    def reduce(self) -> None:
        self.trainer.allreduce_grads()

    def update(self, lr: float, batch_size: int) -> None:
        self.trainer.set_learning_rate(lr)
        self.trainer.update(batch_size)

    def predict(self, X: NDArray) -> NDArray:
        return self.fast(X)

    def evaluate_accuracy(self, data_iter: Iterable[tuple[NDArray, NDArray]]) -> float:
        return evaluate_accuracy(data_iter, self.predict, self.ctx)

    def velocities(self, device: int) -> dict[str, NDArray]:
        if not self.settings.momentum:
            return {}
        return dict(zip(self.grads()[device], self.trainer._updaters[device].states.values()))


def train(num_gpus: int | Sequence[int], batch_size: int, lr: float, **options: Any) -> list[Epoch]:
    """Run the notebook's experiment, which the notebook calls `run`. Prints time and accuracy per epoch.

    num_gpus: number of devices, or their indices ([0, 2]). batch_size: examples per step, across all devices. options:
    see `loop.train`. In addition, hybridize=False runs the network operator by operator, tune=False trains the network
    exactly as written, and tune=(16, 64) pads channels to multiples of 16 and computes shards in pieces of 64 examples.
    """
    return loop.train(Replicas, num_gpus, batch_size, lr, **options)
