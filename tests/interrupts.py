"""Acts while a training step is being issued."""

import signal
import time
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

import pytest

from gluon_mgpu.training import loop


@contextmanager
def in_step(number, act):
    """Call act() while step number `number` of the block is issued."""
    fit, numbers = loop.fit, count(1)

    def fit_with_act(setup, folder):
        def acting_step(*args):
            if next(numbers) == number:
                act()
            return setup.step(*args)

        return fit(setup._replace(step=acting_step), folder)

    with patch.object(loop, "fit", fit_with_act):
        yield


@contextmanager
def at_step(number, *signals):
    """While step number `number` of the block is issued, send signals to this process: (signal, seconds to wait), ...

    The block must end with a KeyboardInterrupt; yields its ExceptionInfo.
    """

    def send():
        for which, seconds in signals:
            signal.raise_signal(which)
            time.sleep(seconds)

    with pytest.raises(KeyboardInterrupt) as caught, in_step(number, send):
        yield caught
