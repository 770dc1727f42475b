"""Reads the losses of steps while later steps are already queued.

Python runs ahead of MXNet's engine: it issues steps in bursts and reads their results later, so it waits once per
burst, not once per step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from mxnet.ndarray import NDArray

from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, setting
from gluon_mgpu.training.workers import Group

# Limits on how far Python runs ahead of the engine. Issuing a burst and then sleeping disturbs MXNet's workers on the
# same cores less than waking up at every step. The limit in seconds also bounds the wait after Ctrl-C.
MOST_STEPS_AHEAD = 16
MOST_SECONDS_AHEAD = 0.4


class Losses:
    """The losses of an epoch's steps: their sum, and a progress bar that shows the latest one. Reading a loss waits for
    the engine, so losses are read some steps later."""

    def __init__(self, epoch: int, examples: int, batch_size: int, steps: int, group: Group) -> None:
        """steps: number of steps before these, in the same epoch."""
        self.title, self.examples, self.batch_size, self.group = f"epoch {epoch}", examples, batch_size, group
        self.steps, self.loss_sum, self.pending = steps, 0.0, Pending()
        options = {"unit": " examples", "unit_scale": True, "desc": self.title}
        self.bar = log.progress(total=examples, initial=steps * batch_size, **options)

    def add(self, shards: list[NDArray], examples: int) -> None:
        """Add the losses of a step that has just been issued. Raises Error if earlier ones are not finite, or if these
        are not one for each of its examples."""
        count = sum(shard.size for shard in shards)
        if count != examples:
            advice = f"a step on {examples} examples returned {count} losses; return one for each, not their mean"
            raise Error(f"train_batch: {advice}")
        self.pending.add(shards)
        for losses in self.pending.ready():
            self._read(losses)

    def finish(self) -> float:
        """Read the remaining losses. Returns the sum over all steps and workers."""
        for losses in self.pending.rest():
            self._read(losses)
        self.bar.close()
        return self.group.total(self.loss_sum)

    def _read(self, losses: np.ndarray) -> None:
        self.bar.update(min(self.batch_size, self.examples - self.steps * self.batch_size))
        self.steps += 1
        loss = float(losses.mean(dtype=np.float64))
        self.loss_sum += loss * len(losses)
        if not math.isfinite(loss):
            self.bar.close()
            place = f"{self.title}, step {self.steps}"
            raise Error(f"the loss is not finite at {place}: training stopped; try a smaller {setting('lr')}")
        self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)


class Pending:
    """The results of steps that the engine may still be computing, in order.

    Each result is a list of arrays, one vector per shard. Reading waits for the engine, so results are read in bursts.
    """

    def __init__(self) -> None:
        self.steps: deque[list[NDArray]] = deque()
        self.allowed, self.began = 1, time.perf_counter()

    def add(self, shards: list[NDArray]) -> None:
        """Add the results of a step that has just been issued."""
        self.steps.append(shards)

    def ready(self) -> Iterator[np.ndarray]:
        """Yield the oldest results, each as one vector (n,), if enough steps have been issued to read a burst."""
        if len(self.steps) < self.allowed:
            return
        burst = len(self.steps) - self.allowed // 8  # the remaining steps keep the engine busy during the next burst
        for _ in range(burst):
            yield _joined(self.steps.popleft())
        now = time.perf_counter()
        self.allowed = int(np.clip(MOST_SECONDS_AHEAD * burst / (now - self.began), 1, MOST_STEPS_AHEAD))
        self.began = now

    def rest(self) -> Iterator[np.ndarray]:
        """Yield all remaining results."""
        while self.steps:
            yield _joined(self.steps.popleft())


def _joined(shards: list[NDArray]) -> np.ndarray:
    return np.concatenate([shard.asnumpy() for shard in shards])
