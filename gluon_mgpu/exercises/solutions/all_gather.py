"""Exercise all_gather: give every device all chunks.

This is the second half of a ring allreduce. In ZeRO, device i has updated chunk i of the parameters, and every device
needs all chunks for its next step. With k devices, each device sends and receives k - 1 chunks.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd


def all_gather(chunks):
    """Returns a list of k vectors, one per device: each vector consists of all chunks, in order.

    chunks: a list of k arrays, one per device. Their sizes may differ.
    """
    k = len(chunks)
    parts = [{i: chunk} for i, chunk in enumerate(chunks)]  # {number: chunk} on each device
    for r in range(k - 1):
        for i in range(k):  # device i sends the chunk that it received last
            j, c = (i + 1) % k, (i - r) % k
            parts[j][c] = parts[i][c].copyto(chunks[j].context)
    return [nd.concat(*[own[c] for c in range(k)], dim=0) for own in parts]
