"""Exercise reduce_scatter: sum vectors by halving, and leave each device one chunk of the sum.

In ZeRO, device i updates only chunk i of the parameters, so it needs only chunk i of the summed gradients. A ring
finds it in k - 1 rounds. If k is a power of 2, log2(k) rounds are enough. In the first round, each device of the first
half of the devices exchanges with one of the second half, i with i + k / 2: it sends the half of its vector that the
other is responsible for, and adds what it receives to the other half. Then each half of the devices does the same with
its half of the vector, and so on. The arrays are halved in each round, so each device sends and receives k - 1 chunks
in all, no more than in a ring.
"""


def chunks(vector, start, end, k):
    """Returns chunks start to end - 1 of k of a vector (n,). It is a view: writing to it changes the vector."""
    n = len(vector)
    return vector[n * start // k : n * end // k]


def reduce_scatter(data):
    """Returns a list of k arrays: chunk i of the sum, on device i.

    data: a list of k vectors (n,), one per device; k is a power of 2, and n is at least k. The function may overwrite
    the vectors.
    """
    k = len(data)
    half = k // 2
    while half:
        for i in range(k):
            start = i // half * half  # device i is responsible for chunks start to start + half - 1, with others
            own, received = (chunks(data[j], start, start + half, k) for j in (i, i ^ half))
            own[:] += received.copyto(own.context)
        half //= 2
    return [chunks(vector, i, i + 1, k) for i, vector in enumerate(data)]
