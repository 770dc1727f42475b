"""Exercise zero1: update the parameters with a sharded optimizer state.

With momentum, data parallelism keeps a velocity for each parameter on every device, and all devices make the same
update. In ZeRO-1, device i keeps only chunk i of the velocities, and updates only chunk i of the parameters:

    v = momentum * v - lr * (sum of the gradients over the devices) / batch_size
    p = p + v

Afterward, all devices have all new parameters again. Each device sends at most 2 (k - 1) chunks, as in a ring
allreduce. Use the functions below, or write your own.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd


def chunk(vector, i, k):
    """Returns chunk i of k of a vector (n,). It is a view: writing to it changes the vector."""
    n = len(vector)
    return vector[n * i // k : n * (i + 1) // k]


def reduce_scatter(data):
    """Returns a list of k arrays: chunk i of the sum of k vectors, on device i."""
    k = len(data)
    return [nd.add_n(*[chunk(v, i, k).as_in_context(data[i].context) for v in data]) for i in range(k)]


def all_gather(chunks, vectors):
    """Copy all chunks into every vector. chunks[i] may be a view of vectors[i]."""
    for vector in vectors:
        for i, part in enumerate(chunks):
            chunk(vector, i, len(chunks))[:] = part.as_in_context(vector.context)


def update(params, grads, velocities, lr, momentum, batch_size):
    """Update params in place. params: a list of k equal vectors (n,), one per device.

    grads: a list of k vectors (n,): on each device, the sum of the gradients of its own examples. velocities: a list of
    k arrays, chunk i on device i, to update in place. batch_size: the number of examples on all devices.
    """
    owned = [chunk(p, i, len(params)) for i, p in enumerate(params)]
    for p, g, v in zip(owned, reduce_scatter(grads), velocities):
        v[:] = momentum * v - lr / batch_size * g
        p += v
    all_gather(owned, params)
