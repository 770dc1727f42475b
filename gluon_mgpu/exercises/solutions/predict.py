"""Exercise predict: classify a batch on several devices.

This is an exercise of the notebook: use several devices for prediction too. No device needs another one's result, so
there is nothing to sum, and all devices can work at the same time. The batch may not divide evenly.
"""

from collections.abc import Callable

from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.scratch import split_and_load


def predict(X: NDArray, net: Callable[[NDArray], NDArray], ctx: list[Context]) -> NDArray:
    """Classify a batch X (n, ...). Returns the class of each example (n,), on ctx[0], in the order of X.

    net: computes scores (m, classes) for m examples, on the device that they are on.
    """
    scores = [net(shard) for shard in split_and_load(X, ctx)]
    classes = [shard.argmax(axis=1).as_in_context(ctx[0]) for shard in scores]
    return nd.concat(*classes, dim=0)
