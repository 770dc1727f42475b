"""Exercise predict: classify a batch on several devices.

This is an exercise from the notebook: use several devices for prediction too. There is nothing to sum, so no device has
to wait for another device. The number of examples need not be a multiple of the number of devices.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd

from gluon_mgpu.scratch import split_and_load


def predict(X, net, ctx):
    """Classify a batch X (n, ...). Returns the class of each example (n,), on ctx[0], in the order of X.

    net: a function that computes the scores (m, classes) of m examples, on their device.
    """
    scores = [net(shard) for shard in split_and_load(X, ctx)]
    classes = [shard.argmax(axis=1).as_in_context(ctx[0]) for shard in scores]
    return nd.concat(*classes, dim=0)  # in the order of the shards
