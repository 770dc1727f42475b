"""Faults to plant in either implementation: what parity must catch.

Each one is a function that breaks `scratch`, `highlevel` or the loop with `replace(owner, name, value)`, which
monkeypatch.setattr is. `python tests/faults.py FAULT OPTION...` is `train` with a fault in it.
"""

import sys

import gluon_mgpu

gluon_mgpu.configure()

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import gluon  # noqa: E402

from gluon_mgpu import highlevel, scratch  # noqa: E402
from gluon_mgpu.training import loop, shared_memory  # noqa: E402


def gradients_not_summed(replace):
    for module in (
        scratch,
        shared_memory,
    ):  # the lesson's first form, and what both implementations have on CPU contexts
        replace(module, "allreduce", lambda data, *_: None)


def gradients_averaged(replace):
    """And then divided by the batch's size all the same."""
    for module in (scratch, shared_memory):

        def average(data, *_, allreduce=module.allreduce):
            allreduce(data)
            for array in data:
                array /= len(data)

        replace(module, "allreduce", average)


def divided_by_the_shards_size(replace):
    train_batch, step = scratch.train_batch, gluon.Trainer.step

    def smaller(X, y, device_params, ctx, lr, *rest):  # what is divided by less is as if the learning rate were larger
        return train_batch(X, y, device_params, ctx, lr * len(ctx), *rest)

    replace(scratch, "train_batch", smaller)
    replace(gluon.Trainer, "step", lambda trainer, n: step(trainer, n / len(trainer._contexts)))


def one_shard_for_all(replace):
    for module in (scratch, highlevel):

        def first_for_all(data, ctx, shares=None, split_and_load=module.split_and_load):
            shards = split_and_load(data, ctx, shares)
            return [shards[0].as_in_context(c) for c, _ in zip(ctx, shards)]

        replace(module, "split_and_load", first_for_all)


def one_replica_not_copied_back(replace):
    """One device keeps its own gradients, and so its parameters go another way."""

    def allreduce(data, *_):
        for i in range(1, len(data)):
            data[0] += data[i].copyto(data[0].context)
        for i in range(1, len(data) - 1):
            data[0].copyto(data[i])

    for module in (scratch, shared_memory):
        replace(module, "allreduce", allreduce)


def learning_rate_a_tenth(replace):
    sgd, set_learning_rate = scratch.sgd, gluon.Trainer.set_learning_rate
    replace(scratch, "sgd", lambda params, lr, *rest: sgd(params, lr / 10, *rest))
    replace(gluon.Trainer, "set_learning_rate", lambda trainer, lr: set_learning_rate(trainer, lr / 10))


def no_shuffling(replace):
    replace(loop, "shuffled", lambda examples, seed, epoch: np.arange(examples))


def initial_scale_ten_times_larger(replace):
    init_params = scratch.init_params
    replace(scratch, "init_params", lambda: init_params(scale=0.1))
    larger = {"lenet": mx.init.Normal(0.1), "lenet-max": mx.init.Uniform(0.7), "resnet18": mx.init.Normal(0.1)}
    replace(highlevel, "MODELS", {name: highlevel.MODELS[name]._replace(init=init) for name, init in larger.items()})


def biases_not_updated(replace):
    def without(replicas, *args, train_batch=scratch.Replicas.train_batch):
        biases = [[(p, p.copy()) for p in params[1::2]] for params in replicas.device_params]
        losses = train_batch(replicas, *args)
        for before in biases:
            for p, values in before:
                p[:] = values
        return losses

    replace(scratch.Replicas, "train_batch", without)
    initialize = highlevel.initialize

    def without_biases(net, *args, **kwargs):
        initialize(net, *args, **kwargs)
        for p in net.collect_params(".*bias").values():
            p.lr_mult = 0

    replace(highlevel, "initialize", without_biases)


FAULTS = {
    fault.__name__: fault
    for fault in (
        gradients_not_summed,
        gradients_averaged,
        divided_by_the_shards_size,
        one_shard_for_all,
        one_replica_not_copied_back,
        learning_rate_a_tenth,
        no_shuffling,
        initial_scale_ten_times_larger,
        biases_not_updated,
    )
}

if __name__ == "__main__":
    from gluon_mgpu.commands.train import train

    FAULTS[sys.argv[1]](setattr)
    train(sys.argv[2:])
