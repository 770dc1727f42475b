"""Exercise timing: measure the work, not the queue.

An MXNet call puts an operator into the queue of a device and returns. So a clock that is read right after the call
measures only the time to fill the queue. Write a function that measures how long the devices take to do the given work.
Do not measure anything else: the devices may still be busy with earlier work when the function is called.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd


def measure(work, clock):
    """Returns the number of seconds from the call to work() until all of its results are computed.

    work: a function that queues operators on several devices, and returns a list of results, one per device. clock: a
    function that returns the time in seconds, like time.perf_counter.
    """
    nd.waitall()
    start = clock()
    work()
    nd.waitall()
    return clock() - start  # all devices are done
