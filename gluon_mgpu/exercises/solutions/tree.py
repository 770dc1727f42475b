"""Exercise tree: sum over devices in a tree.

If all arrays go through the first device, k devices need 2 (k - 1) copies in a row. In a tree, pairs of devices add
their arrays at the same time: 0 += 1 and 2 += 3, then 0 += 2. The sum then goes back down the same way. So the number
of rounds grows only with log2(k). Write a tree allreduce for any number of devices, not only for powers of 2.
"""


def tree_allreduce(data):
    """Sum arrays in place. data: a list of arrays of the same shape, one per device."""
    pairs, distance = [], 1
    while distance < len(data):
        pairs += [(i, i + distance) for i in range(0, len(data) - distance, 2 * distance)]
        distance *= 2
    for receiver, sender in pairs:
        data[receiver][:] += data[sender].copyto(data[receiver].context)
    for sender, receiver in reversed(pairs):
        data[sender].copyto(data[receiver])
