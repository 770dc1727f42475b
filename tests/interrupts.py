"""Sends signals while a training step is being issued."""

import signal
import time


def at_step(monkeypatch, replicas, step, *signals):
    """While the step'th step from here is issued, send (signal, seconds to wait after it) ... to this process.

    replicas: the `Replicas` of a lesson.
    """
    original, steps = replicas.train_batch, []

    def train_batch(self, *args):
        steps.append(args)
        if len(steps) == step:
            for which, seconds in signals:
                signal.raise_signal(which)
                time.sleep(seconds)
        return original(self, *args)

    monkeypatch.setattr(replicas, "train_batch", train_batch)
