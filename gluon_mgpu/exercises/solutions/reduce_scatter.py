"""Exercise reduce_scatter: sum vectors, and leave each device one chunk of the sum.

A ring allreduce has two halves, and each is useful alone. In ZeRO, device i updates only chunk i of the parameters, so
it needs only chunk i of the summed gradients: the first half is enough. With k devices, each device sends and receives
k - 1 chunks.
"""


def chunk(vector, i, k):
    """Returns chunk i of k of a vector (n,). It is a view: writing to it changes the vector."""
    n = len(vector)
    return vector[n * i // k : n * (i + 1) // k]


def reduce_scatter(data):
    """Returns a list of k arrays: chunk i of the sum, on device i.

    data: a list of k vectors (n,), one per device; n is at least k. The function may overwrite them.
    """
    k = len(data)
    for r in range(k - 1):
        for i in range(k):  # device i sends a chunk, with the sum of r + 1 devices, to device j
            j, c = (i + 1) % k, (i - 1 - r) % k
            chunk(data[j], c, k)[:] += chunk(data[i], c, k).copyto(data[j].context)
    return [chunk(vector, i, k) for i, vector in enumerate(data)]
