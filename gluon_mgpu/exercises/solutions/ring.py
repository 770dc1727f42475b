"""Exercise ring: sum over devices in a ring.

In a ring, device i sends only to device i + 1, and the last device sends to the first. With k devices, each array of n
elements is cut into k chunks. In each of k - 1 steps, every device sends one chunk to the next device, which adds it to
its own chunk. Then every chunk is complete on one device. In k - 1 more steps, the complete chunks go around the ring
and replace the incomplete ones. So each device receives 2 (k - 1) chunks of n / k elements: fewer than 2 n elements,
for any number of devices.
"""


def ring_allreduce(data):
    """Sum vectors in place. data: a list of k vectors of n elements, one per device; n is at least k."""
    k, n = len(data), len(data[0])

    def chunk(device, index):
        index %= k
        return data[device % k][n * index // k : n * (index + 1) // k]

    for step in range(k - 1):  # afterward, chunk i + 1 is complete on device i
        for i in range(k):
            chunk(i + 1, i - step)[:] += chunk(i, i - step).copyto(data[(i + 1) % k].context)
    for step in range(k - 1):
        for i in range(k):
            chunk(i, i + 1 - step).copyto(chunk(i + 1, i + 1 - step))
