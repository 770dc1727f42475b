"""Exercise ring: sum over devices in a ring that turns backward.

Here, device i sends only to device i - 1, and device 0 sends to the last device. With k devices, each array of n
elements is cut into k chunks. In the first half, reduce-scatter, which takes k - 1 rounds, every device sends one chunk
per round to the device before it, which adds it to its own chunk. Then every chunk is complete on one device. In the
second half, all-gather, which takes k - 1 more rounds, the complete chunks go around the ring and replace the others.
So each device receives 2 (k - 1) chunks of n / k elements: fewer than 2 n elements, for any number of devices.
"""


def ring_allreduce(data):
    """Sum vectors in place. data: a list of k vectors of n elements, one per device; n is at least k."""
    k, n = len(data), len(data[0])

    def chunk(device, index):
        index %= k
        return data[device % k][n * index // k : n * (index + 1) // k]

    for r in range(k - 1):  # afterward, chunk i - 1 is complete on device i
        for i in range(k):
            chunk(i - 1, i + r)[:] += chunk(i, i + r).copyto(data[i - 1].context)
    for r in range(k - 1):
        for i in range(k):
            chunk(i, i - 1 + r).copyto(chunk(i - 1, i - 1 + r))
