"""Exercise replicas: change the parameters on every device.

A Gluon network that was initialized on several devices has a replica of each parameter on each device. Training keeps
the replicas equal, because every device makes the same update. Any other change has to be made on all devices too.
Make such a change: limit the absolute values of all parameters, as is done after each step when some generative
networks are trained.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd


def clip(net, limit):
    """Set values above limit to limit, and values below -limit to -limit, in all parameters on all devices."""
    for parameter in net.collect_params().values():
        for replica in parameter.list_data():
            nd.clip(replica, -limit, limit, out=replica)
