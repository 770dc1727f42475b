"""Handles Ctrl-C and SIGTERM during training: the run finishes its step, saves a checkpoint, and stops."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Interrupted

SAME_SIGNAL = 0.5  # seconds; a second signal within this time is a duplicate from mpiexec or a cluster manager
Item = TypeVar("Item")


class CtrlC:
    """Defers Ctrl-C and SIGTERM until the whole step is issued, because half a step would make the replicas unequal.

    A second Ctrl-C takes effect immediately. Python delivers signals only to the main thread; in any other thread, this
    class does nothing.
    """

    def __init__(self, saves: bool) -> None:
        """saves: whether the run saves a checkpoint when it stops; used only in the notice."""
        self.saves = saves

    def __enter__(self) -> CtrlC:
        self.asked, self.since = False, 0.0
        main = threading.current_thread() is threading.main_thread()
        signals = [s for s in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(s) is not signal.SIG_IGN]
        self.before = {s: signal.signal(s, self._handle) for s in signals}
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        for which, handler in self.before.items():
            signal.signal(which, handler)
        if self.asked and kind is None:  # the signal arrived after the last step
            raise Interrupted("interrupted; all epochs are finished")

    def _handle(self, *_: object) -> None:
        if self.asked:
            if time.monotonic() - self.since < SAME_SIGNAL:
                return
            raise KeyboardInterrupt
        self.asked, self.since = True, time.monotonic()
        if not log.rank():
            notice = f"stopping; press Ctrl-C again to stop now{', without a checkpoint' * self.saves}"
            with suppress(OSError):  # the reader of standard error may be gone
                os.write(2, f"\ngluon_mgpu: {notice}\n".encode())

    def between(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items; after Ctrl-C, raises Interrupted instead of yielding the next item."""
        for item in items:
            if self.asked:
                raise Interrupted
            yield item
