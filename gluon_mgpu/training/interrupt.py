"""Handles Ctrl-C and SIGTERM during training: the run finishes its step, saves a checkpoint, and stops."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from gluon_mgpu.distributed.process import SAME_SIGNAL
from gluon_mgpu.distributed.workers import Workers
from gluon_mgpu.runtime.errors import Interrupted

Item = TypeVar("Item")


class CtrlC:
    """Defers Ctrl-C and SIGTERM until the whole step is issued, because half a step would make the replicas unequal.

    A second Ctrl-C takes effect immediately. If no step is left, the run finishes as usual. Python delivers signals
    only to the main thread; in any other thread, this class does nothing. If one worker is interrupted, all workers
    stop at the same step.
    """

    def __init__(self, workers: Workers, checkpoint: bool) -> None:
        """checkpoint: whether the run saves a checkpoint when it stops; used only in the notice."""
        self.workers, self.checkpoint = workers, checkpoint

    def __enter__(self) -> CtrlC:
        self.asked, self.stopped, self.since = False, False, 0.0
        main = threading.current_thread() is threading.main_thread()
        self.before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM) if main}
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self.before.items():
            signal.signal(which, handler)

    def _handle(self, *_: object) -> None:
        if self.asked:
            if time.monotonic() - self.since < SAME_SIGNAL:
                return
            raise KeyboardInterrupt
        self.asked, self.since = True, time.monotonic()
        without = ", without saving a checkpoint" if self.checkpoint else ""
        with suppress(OSError):  # the reader of standard error may be gone
            os.write(2, f"\ngluon_mgpu: stopping after this step; press Ctrl-C again to stop now{without}\n".encode())

    def wanted(self, step: int) -> bool:
        """Whether to stop before step number `step`, counted from 0. All workers stop at the same step."""
        alone = self.asked and not (self.workers.stopping or self.workers.ask_to_stop())
        self.stopped = alone or not self.workers.may_step(step)
        return self.stopped

    def between(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items; after Ctrl-C, raises Interrupted instead of yielding the next item."""
        for item in items:
            if self.asked:
                raise Interrupted
            yield item
