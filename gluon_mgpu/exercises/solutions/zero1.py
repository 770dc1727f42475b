"""Exercise zero1: update the parameters with a sharded optimizer state.

With momentum, data parallelism keeps a velocity for each parameter on every device, and all devices make the same
update. In ZeRO-1, each velocity is on one device only, its owner. Large vectors are cut into chunks, as in the lesson.
PyTorch's ZeroRedundancyOptimizer does not cut: each parameter has one owner, here device i % k for parameter i. The
owner alone sums the gradients, and updates the parameter:

    v = momentum * v - lr * (sum of the gradients over the devices) / batch_size
    p = p + v

Afterward, all devices have all new parameters again. So each gradient is copied only to the owner, and each new
parameter from the owner to the other devices.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd


def update(params, grads, velocities, lr, momentum, batch_size):
    """Update params and velocities in place. Arrays have any shape.

    params: a list with one list per device, which contains its replica of each parameter. grads: lists of the same
    form: on each device, the sums of the gradients of its own examples. velocities: one array per parameter, on the
    parameter's owner. batch_size: the number of examples on all devices.
    """
    for i, v in enumerate(velocities):
        g = nd.add_n(*[own[i].as_in_context(v.context) for own in grads])
        v[:] = momentum * v - lr / batch_size * g
        p = params[i % len(params)][i]
        p += v
        for own in params:
            if own[i] is not p:
                p.copyto(own[i])
