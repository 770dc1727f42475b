"""Exercise block: split a gated block so that one sum is enough.

The dense block of many language models has a gate: hidden = relu(X W1.T + b1) * (X V.T), element by element; then
output = hidden W2.T + b2. A device that holds some rows of W1, b1 and V computes some of the hidden values. If it also
holds the columns of W2 that belong to these values, it can go on without the other devices: nothing is copied between
the layers. What it computes is a part of a sum, so the devices add their parts, once. If the hidden values cannot be
divided evenly, the devices' numbers differ by one.

Use the functions imported from gluon_mgpu.scratch, or write your own.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd

from gluon_mgpu.scratch import allreduce, split_and_load


def dense(X, W):
    """Returns X W.T (n, m), for X (n, d) and W (m, d) on the same device."""
    return nd.FullyConnected(X, W, no_bias=True, num_hidden=W.shape[0])


def block(X, W1, b1, V, W2, b2, ctx):
    """Compute a block on k devices. Returns a list of k arrays: the output (n, m) on each device.

    X (n, d), W1 (h, d), b1 (h,), V (h, d), W2 (m, h), b2 (m,): arrays on ctx[0]; h is at least k.
    """
    parts = []
    for W, b, G, U in zip(*[split_and_load(p, ctx) for p in (W1, b1, V, W2.T)]):
        x = X.as_in_context(W.context)
        hidden = nd.relu(dense(x, W) + b) * dense(x, G)
        parts.append(dense(hidden, U.T))
    allreduce(parts)
    return [part + b2.as_in_context(part.context) for part in parts]
