"""Exercise buckets: sum gradients in buckets.

Each message costs time, however short it is. So DDP joins small gradients into buckets, and sums one bucket at a time.
A single bucket would be slow too: it could not be sent before the backward pass is complete. The backward pass computes
the gradients of the last parameters first, so buckets are filled and sent in this order:

- Start with the last parameter, and proceed to the first.
- Add gradients to a bucket until the next one would exceed the limit. Then begin the next bucket.
- A gradient that exceeds the limit alone has its own bucket.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd

from gluon_mgpu.scratch import allreduce


def allreduce_buckets(grads, limit):
    """Sum gradients over the devices, in place: call allreduce once per bucket, with one vector per device.

    grads: a list with one list per device, which contains the gradient of each parameter, of any shape. limit: the
    number of elements that fit into a bucket.
    """
    sizes = [g.size for g in grads[0]]
    buckets = [[len(sizes) - 1]]
    for i in reversed(range(len(sizes) - 1)):
        if sum(sizes[j] for j in buckets[-1]) + sizes[i] > limit:
            buckets.append([])
        buckets[-1].append(i)
    for bucket in buckets:
        vectors = [nd.concat(*[own[i].reshape(-1) for i in bucket], dim=0) for own in grads]
        allreduce(vectors)
        for own, vector in zip(grads, vectors):
            start = 0
            for i in bucket:
                own[i][:] = vector[start : start + sizes[i]].reshape(own[i].shape)
                start += sizes[i]
