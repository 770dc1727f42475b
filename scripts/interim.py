"""The new interface on top of the old one. Goes at the switch."""

from gluon_mgpu import implementations
from gluon_mgpu.training.settings import Settings


def LessonConfig(gpus=1, **fields):
    return Settings(num_gpus=gpus, **{"tune": False, **fields})


class Model:
    def __init__(self, replicas):
        self.replicas, self.ctx, self.lesson = replicas, replicas.ctx, replicas.lesson
        self.predict, self.load = replicas.predict, replicas.load_state_dict
        self.forward_backward, self.allreduce, self.update = replicas.forward_backward, replicas.allreduce, replicas.update
        self.net = getattr(replicas, "net", None)
        self.config = replicas.settings

    def step(self, X, y, lr):
        return self.replicas.train_batch(X, y, lr)

    def arrays(self, device=0):
        return self.replicas.arrays[device]

    def grads(self, device=0):
        return self.replicas.grads()[device]


def build(impl, ctx, config=None):
    return Model(implementations.replicas(impl, ctx, config or LessonConfig()))


def extended(model, group=None):
    return model.step


def train(*, gpus=1, **options):
    return implementations.train(num_gpus=gpus, **options)
