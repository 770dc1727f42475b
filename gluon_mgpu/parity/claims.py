"""What the lecture on the notebooks claims, each claim checked as far as the devices here can show it.

An accuracy can decide a claim. A time can show one, but not refute it, since times are a machine's: where one is not as
the lecture saw it, the claim is not shown here. Source: the lecture "L14_6 Multi-GPU Training in Python".
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median
from typing import TYPE_CHECKING

import mxnet as mx
import numpy as np
from mxnet import Context

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.parity import bands
from gluon_mgpu.parity.finding import Finding
from gluon_mgpu.training import loop
from gluon_mgpu.training.datasets import Dataset
from gluon_mgpu.training.settings import Settings

if TYPE_CHECKING:
    from gluon_mgpu.training.batch_size import Result

CHECK = "the lecture's claims"
LIKE = "scratch-lenet-fashion-mnist-1gpu"  # the recipe that `batch_size` varies
EXAMPLES, SHARES = 100, (80, 20)
ROUNDING = 1e-5  # of an update, relative: float32 has 6e-8, and sums of some hundred terms
ENOUGH = 3  # seeds that all say the same: one of two equals does so once in 4 times, and a single seed always
CPU_IS_NOT_A_GPU = "CPU contexts share the cores that one context has alone, so they cannot show what a GPU adds"


OF_BATCH_SIZE = (
    "a batch of 256 learns about as well on 2 devices as on 1",
    "a batch of 256 takes about as long on 2 devices as on 1",
    "a batch of 512 on 2 devices makes an epoch shorter, though by less than 2 times",
    "a batch of 512 learns more slowly than one of 256",
    "a batch of 512 learns faster with its learning rate doubled",
)


def placed(ctx: list[Context]) -> Iterator[Finding]:
    """The claim on ResNet-18: its parameters live on the contexts that it was initialized on, and on no other."""
    replicas = highlevel.Replicas(ctx, Settings(model="resnet18"))
    named = dict(replicas.net.collect_params())
    right = bool(named) and all([array.context for array in p.list_data()] == ctx for p in named.values())
    yield Finding(CHECK, f"ResNet-18's parameters live on each of {ctx}", right, f"{len(named)} arrays on each")
    other = mx.Context(ctx[0].device_type, len(ctx))
    try:
        next(iter(named.values())).data(other)
        refused, said = False, "it answered"
    except RuntimeError as error:
        refused, said = True, str(error).splitlines()[0]
    yield Finding(CHECK, f"asking for them on {other} raises RuntimeError", refused, said)


def shared_unevenly(ctx: list[Context], mnist: Dataset) -> Iterator[Finding]:
    """The claim on devices of unequal speed: shards are of the sizes asked for, and the step is still the batch's."""
    X, y = next(loop.batches(mnist.train_images[:EXAMPLES], mnist.train_labels[:EXAMPLES], EXAMPLES))
    for impl, module in (("scratch", scratch), ("highlevel", highlevel)):
        sizes = [shard.shape[0] for shard in module.split_and_load(X, ctx, SHARES)]
        after = []
        even = module.Replicas(ctx[:1])
        start = even.parameters()
        for replicas in (even, module.Replicas(ctx, Settings(shares=SHARES))):
            replicas.load(start, {})
            replicas.train_batch(X, y, 0.2)
            after.append(np.concatenate([array.ravel() for array in replicas.parameters().values()]))
        before = np.concatenate([array.ravel() for array in start.values()])
        apart = float(np.linalg.norm(after[0] - after[1]) / np.linalg.norm(after[0] - before))
        yield Finding(
            CHECK,
            f"{impl}: of {EXAMPLES} examples the faster device gets {SHARES[0]}, and the update is one device's",
            sizes == list(SHARES) and apart < ROUNDING,
            f"shards of {sizes}; updates {apart:.1e} apart",
        )
    yield Finding(CHECK, "uneven shards save time where speeds differ", None, "the devices here are taken for equals")


def batch_size(experiments: dict[int, list[Result]], cpu: bool) -> Iterator[Finding]:
    """The claims on a second device and a larger batch. experiments: {seed: what `batch_size.run` gave}."""
    runs = {seed: [result.epochs for result in results] for seed, results in experiments.items()}
    curves = {seed: [[e.test_accuracy for e in epochs] for epochs in results] for seed, results in runs.items()}
    seconds = np.array([[median(e.train_seconds for e in epochs) for epochs in results] for results in runs.values()])
    second, doubled = (median(seconds[:, 0] / seconds[:, i]) for i in (1, 2))
    earlier = list(bands.kept(LIKE).values())
    compared = [band for one, two, *_ in curves.values() for band in bands.bands([one], two, earlier, digits=4)]
    outside = sum(not band.holds for band in compared)
    differ = max(abs(a - b) for one, two, *_ in curves.values() for a, b in zip(one, two))
    figure = f"{outside} of {len(compared)} outside the band of 1 device; {differ:.3f} apart at most"
    yield Finding(CHECK, OF_BATCH_SIZE[0], outside == 0, figure)

    figure = f"an epoch {second:.2f} times as fast, medians{f'; {CPU_IS_NOT_A_GPU}' * cpu}"
    yield Finding(CHECK, OF_BATCH_SIZE[1], None, figure)
    figure = f"{doubled:.2f} times as fast, medians"
    yield Finding(CHECK, OF_BATCH_SIZE[2], True if 1 < doubled < 2 else None, figure)
    for claim, higher, lower in ((OF_BATCH_SIZE[3], 1, 2), (OF_BATCH_SIZE[4], 3, 2)):
        pairs = [(mean(curve[higher]), mean(curve[lower])) for curve in curves.values()]
        so = sum(a > b for a, b in pairs)
        holds = so > 0 if so in (0, len(pairs)) and len(pairs) >= ENOUGH else None
        a, b = (mean(values) for values in zip(*pairs))
        figure = f"so with {so} of {len(pairs)} seeds; mean accuracy over the epochs {a:.2f} and {b:.2f}"
        yield Finding(CHECK, claim, holds, figure)
