"""Exercise seeds: draw the right random numbers on every device.

Initial weights must be equal on all devices, or the replicas are different networks. Dropout masks must differ between
devices: otherwise, the examples of different shards share masks, which adds noise. When the program runs again with the
same seed, weights and masks must be the same as before.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
import mxnet as mx
from mxnet import nd


def prepare(ctx, seed):
    """Draw random arrays from a seed. Returns two lists, weights and masks, each with one array per device in ctx.

    A weight has shape (4, 3), and is drawn from the standard normal distribution. A mask has shape (100,): each element
    is 0 or 1 with equal probability.
    """
    mx.random.seed(seed)  # seeds all devices, which then draw different numbers
    weight = nd.random.normal(shape=(4, 3))
    weights = [weight.copyto(c) for c in ctx]
    masks = [nd.random.uniform(shape=(100,), ctx=c) < 0.5 for c in ctx]
    return weights, masks
