"""Faults that parity must catch. Each is a function that breaks both implementations.

replace: monkeypatch.setattr, or setattr.
"""

import functools

from mxnet.gluon import Trainer

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.training import tuning

TRAINERS = (Trainer, tuning.Trainer)


def gradients_not_summed(replace):
    replace(scratch, "allreduce", lambda data: None)
    for kind in TRAINERS:
        replace(kind, "_allreduce_grads", lambda trainer: None)


def divided_by_the_shards_size(replace):
    train_batch, step = scratch.train_batch, Trainer.step

    def larger_lr(X, y, device_params, ctx, lr, **options):
        return train_batch(X, y, device_params, ctx, lr * len(ctx), **options)

    replace(scratch, "train_batch", larger_lr)
    replace(Trainer, "step", lambda trainer, n: step(trainer, n / len(trainer._contexts)))


def one_shard_for_all(replace):
    for module in (scratch, highlevel):

        def first_for_all(data, ctx, split_and_load=module.split_and_load):
            shards = split_and_load(data, ctx)
            return [shards[0].as_in_context(c) for c, _ in zip(ctx, shards)]

        replace(module, "split_and_load", first_for_all)


def learning_rate_a_tenth(replace):
    sgd, set_learning_rate = scratch.sgd, Trainer.set_learning_rate
    replace(scratch, "sgd", lambda params, lr, batch_size: sgd(params, lr / 10, batch_size))
    replace(Trainer, "set_learning_rate", lambda trainer, lr: set_learning_rate(trainer, lr / 10))


def biases_not_updated(replace):
    sgd, initialize = scratch.sgd, highlevel.initialize
    replace(scratch, "sgd", lambda params, lr, batch_size: sgd(params[::2], lr, batch_size))

    @functools.wraps(initialize)  # keeps its arguments
    def without_biases(net, *args, **options):
        initialize(net, *args, **options)
        for p in net.collect_params(".*bias").values():
            p.lr_mult = 0

    replace(highlevel, "initialize", without_biases)
