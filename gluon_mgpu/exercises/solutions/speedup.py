"""Exercise speedup: estimate whether a second device pays off.

Measure a step on one device, with two batch sizes. The line through both points shows how many seconds each example
takes, and how many a step takes without any: the calls and the update. This fixed time remains on every device; all
spend it at the same time. With k devices, the largest shard decides when all gradients are ready. Then a ring sums
them, in 2 (k - 1) rounds. In each round, every device sends a k-th of size, all at the same time: a round takes latency
+ that k-th / bandwidth seconds.
"""

import math


def speedup(k, n, measured, size, latency, bandwidth):
    """Returns how many times as fast k devices are as one, for a batch of n examples. Below 1, they are slower.

    measured: two pairs (examples, seconds of a step on one device). size: the bytes of all gradients. latency: seconds
    per round. bandwidth: bytes per second.
    """
    (few, fast), (many, slow) = measured
    example = (slow - fast) / (many - few)
    fixed = fast - few * example
    ring = 2 * (k - 1) * (latency + size / k / bandwidth)
    return (fixed + n * example) / (fixed + math.ceil(n / k) * example + ring)
