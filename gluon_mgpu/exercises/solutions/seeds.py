"""Exercise seeds: draw the right random numbers on every device.

Two kinds of random numbers: initial weights must be equal on all devices, or the replicas are different networks.
Dropout masks must differ, or the devices drop the same positions and the batch has fewer independent masks. Both must
be the same again if the program runs again with the same seed.
"""

import mxnet as mx
from mxnet import Context, nd
from mxnet.ndarray import NDArray


def prepare(ctx: list[Context], seed: int) -> tuple[list[NDArray], list[NDArray]]:
    """Draw from a seed. Returns (weights, masks), with one array per device of ctx in each of the two lists.

    A weight is (4, 3), drawn from the standard normal distribution. A mask is (100,), each element 0 or 1 with equal
    probability.
    """
    mx.random.seed(seed)  # all devices, which then draw different numbers
    weight = nd.random.normal(shape=(4, 3))
    weights = [weight.copyto(c) for c in ctx]
    masks = [nd.random.uniform(shape=(100,), ctx=c) < 0.5 for c in ctx]
    return weights, masks
