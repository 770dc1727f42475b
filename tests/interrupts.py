"""Sends signals while a training step is being issued."""

import signal
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from gluon_mgpu.training.replicas import Replicas


@contextmanager
def at_step(step, *signals):
    """While step number `step` of the block is issued, send signals to this process: (signal, seconds to wait), ...

    The block must end with a KeyboardInterrupt; yields its ExceptionInfo.
    """
    original, steps = Replicas.train_batch, []

    def train_batch(self, *args):
        steps.append(args)
        if len(steps) == step:
            for which, seconds in signals:
                signal.raise_signal(which)
                time.sleep(seconds)
        return original(self, *args)

    with patch.object(Replicas, "train_batch", train_batch), pytest.raises(KeyboardInterrupt) as caught:
        yield caught
