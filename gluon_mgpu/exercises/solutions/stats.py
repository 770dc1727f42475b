"""Exercise stats: average running statistics over devices.

Batch normalization keeps a running mean and a running variance, which it uses for prediction. They are not trained:
each device updates its statistics from its own shards, and no allreduce sums them. So they drift apart, and the
network's predictions depend on the device. Write a function that makes the statistics equal again: on every device, it
sets them to their average over the devices. net.collect_params(".*running.*") returns these statistics, which Gluon
stores as parameters.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import nd


def average_running_stats(net):
    """Set each running_mean and running_var, on every device, to its mean over the devices."""
    for parameter in net.collect_params(".*running.*").values():
        replicas = parameter.list_data()
        mean = nd.add_n(*[replica.as_in_context(replicas[0].context) for replica in replicas]) / len(replicas)
        for replica in replicas:
            mean.copyto(replica)
