"""Exercise timing: measure the work, not the queue.

An MXNet call puts an operator into the queue of a device and returns. So a clock that is read right after the call
measures only how long it takes to fill the queue. Write a function that measures how long the devices need for
some work, and only for this work: they may still be busy with something else when the function is called.
"""

from collections.abc import Callable

from mxnet import nd
from mxnet.ndarray import NDArray


def measure(work: Callable[[], list[NDArray]], clock: Callable[[], float]) -> float:
    """Returns the seconds from the call of work() until all its results are computed.

    work: queues operators on several devices, and returns their results, one per device. clock: returns the time in
    seconds, as time.perf_counter does.
    """
    nd.waitall()
    start = clock()
    work()
    nd.waitall()
    return clock() - start
