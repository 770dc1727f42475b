"""Exercise overlap: copy results while the device computes the next ones.

A GPU can compute one result while it copies the previous one to the host, but only if Python has queued both. Start
each copy as soon as the result is computed, but never make the device wait for a copy.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd


def run_and_copy(parts, compute, host):
    """Apply compute to all parts. Returns the results, copied to the context `host`, once all copies are complete.

    parts: a list of arrays. compute: a function that queues the work for one part, and returns its result.
    """
    results = [compute(part).copyto(host) for part in parts]
    nd.waitall()
    return results  # all of them are on the host
