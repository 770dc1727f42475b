"""How gluon.Trainer sums gradients over several workers: on this one's devices first, then over all workers."""

import mxnet as mx
from mxnet import kvstore

from gluon_mgpu import shared_memory


class Store(kvstore.KVStoreBase):
    """ctx: this worker's devices; workers: a `workers.Workers`."""

    type, rank, num_workers = "workers", 0, 1  # for Trainer, which would otherwise refuse to update by itself

    def __init__(self, ctx, workers):
        self.workers = workers
        self.inside = shared_memory.Store() if shared_memory.serves(ctx) else mx.kv.create("device")

    def broadcast(self, key, value, out, priority=0):
        self.inside.broadcast(key, value, out, priority)

    def pushpull(self, key, value, out=None, priority=0):
        if len(value) > 1:
            self.inside.pushpull(key, value, priority=priority)
        self.workers.allreduce(value[0], key)
        for replica in value[1:]:
            value[0].copyto(replica)

    @staticmethod
    def is_capable(capability):
        return False  # it runs no optimizer
