"""Checks the lecture's claims about the notebooks, as far as this machine's devices allow.

Accuracies can confirm or refute a claim. Times can confirm but not refute a claim, because they depend on the machine.
Source: the lecture "L14_6 Multi-GPU Training in Python".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np
from batch_size.experiment import Result
from mxnet import Context

from gluon_mgpu import highlevel, networks
from gluon_mgpu.data.batches import batches
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.model import read_arrays
from gluon_mgpu.training.models import create_model
from gluon_mgpu.training.step import assemble
from gluon_mgpu.training.workers import Group
from parity import Finding, bands, drift, examples

CHECK = "the lecture's claims"
RECIPE = "scratch-lenet-fashion-mnist-1gpu"  # `batch_size` varies the options of this recipe
EXAMPLES, SHARES = 100, (80, 20)
ENOUGH = 3  # minimum number of seeds for a verdict; two seeds could agree by chance
OF_BATCH_SIZE = (
    "with a batch size of 256, the network learns about as well on 2 devices as on 1",
    "with a batch size of 256, an epoch takes about as long on 2 devices as on 1",
    "with a batch size of 512 on 2 devices, an epoch is faster, but less than twice as fast",
    "with a batch size of 512, the network learns more slowly than with 256",
    "with a batch size of 512, the network learns faster if the learning rate is doubled",
)


def placed(ctx: list[Context]) -> Iterator[Finding]:
    """Check that ResNet-18's parameters exist only on the contexts that they were initialized on."""
    net = networks.resnet18()
    highlevel.initialize(net, ctx)
    for c in ctx:
        net(mx.nd.zeros((1, 1, 28, 28), ctx=c))  # creates the parameters
    params = list(net.collect_params().values())
    right = all([array.context for array in p.list_data()] == ctx for p in params)
    yield Finding(CHECK, f"ResNet-18's parameters are on each of {ctx}", right, f"{len(params)} arrays")
    other = mx.Context(ctx[0].device_type, len(ctx))
    try:
        params[0].data(other)
        refused, evidence = False, "no error"
    except RuntimeError as error:
        refused, evidence = True, str(error).splitlines()[0]
    yield Finding(CHECK, f"reading ResNet-18's parameters from {other} raises RuntimeError", refused, evidence)


def shared_unevenly(ctx: list[Context], mnist: Dataset) -> Iterator[Finding]:
    """Check the sizes of uneven shards for devices of unequal speed, and that the update is the same as on 1 device."""
    X, y = next(batches(mnist.train_images[:EXAMPLES], mnist.train_labels[:EXAMPLES], EXAMPLES))
    for impl in examples.MODELS:
        one = create_model(impl, ctx[:1])
        shared: Any = create_model(impl, ctx, Config(shares=SHARES))
        before = read_arrays(one)
        shared.load(before)
        one.step(X, y, 0.2)
        sizes = [losses.shape[0] for losses in assemble(shared, Group())(X, y, 0.2)]
        after = read_arrays(one)
        limit = drift.rounding(before, after, EXAMPLES * drift.POSITIONS)
        error = drift.distance(read_arrays(shared), after) / drift.distance(before, after)
        claim = (
            f"{impl}: the faster device gets {SHARES[0]} of {EXAMPLES} examples; the update is the same as on 1 device"
        )
        holds = sizes == list(SHARES) and error <= limit
        yield Finding(CHECK, claim, holds, f"shards of {sizes}; updates differ by {error:.1e}, limit {limit:.1e}")
    yield Finding(CHECK, "uneven shards save time on unequal devices", None, "devices are assumed to be equally fast")


def batch_size(experiments: list[list[Result]], cpu: bool) -> Iterator[Finding]:
    """Check the claims about a second device and a larger batch.

    experiments: one result of `experiment.run` per seed.
    """
    accuracy, seconds = (  # shape (seeds, runs, epochs); runs are in the order of experiment.RUNS
        np.array([[[getattr(epoch, name) for epoch in result.epochs] for result in results] for results in experiments])
        for name in ("test_accuracy", "train_seconds")
    )
    kept = list(bands.kept(RECIPE).values())
    compared = [band for one, two, *_ in accuracy for band in bands.bands([one], two, kept, digits=4)]
    outside = sum(not band.holds for band in compared)
    evidence = f"{outside} of {len(compared)} accuracies are outside the bands for 1 device"
    yield Finding(CHECK, OF_BATCH_SIZE[0], outside == 0, evidence)

    medians = np.median(seconds, axis=2)
    _, same_batch, _, larger_batch, _ = np.median(medians[:, :1] / medians, axis=0)
    why = "; CPU contexts share the cores that a single context has to itself" if cpu else ""
    yield Finding(CHECK, OF_BATCH_SIZE[1], None, f"an epoch is {same_batch:.2f} times as fast{why}")
    holds = True if 1 < larger_batch < 2 else None
    yield Finding(CHECK, OF_BATCH_SIZE[2], holds, f"{larger_batch:.2f} times as fast")

    means = accuracy.mean(axis=2)
    for claim, better, worse in ((OF_BATCH_SIZE[3], 1, 3), (OF_BATCH_SIZE[4], 4, 3)):
        agree, seeds = int((means[:, better] > means[:, worse]).sum()), len(means)
        undecided = seeds < ENOUGH or 0 < agree < seeds
        yield Finding(CHECK, claim, None if undecided else agree > 0, f"true for {agree} of {seeds} seeds")
