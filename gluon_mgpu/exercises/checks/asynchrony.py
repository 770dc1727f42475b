"""Hidden cases of the exercises on asynchronous execution. No case measures real time."""

from __future__ import annotations

from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.exercises.cases import Answer, Copy, compare, contexts, recording, values
from gluon_mgpu.exercises.report import Mistake

EARLIER, QUEUE = 100, 1  # seconds that device 0 is busy at the start; seconds that queueing takes


class Devices:
    """Two devices with a simulated clock. Queueing advances it by QUEUE, waiting to the end of what is waited for."""

    def __init__(self, seconds: tuple[int, int]) -> None:
        self.seconds, self.ctx, self.now, self.done, self.reads = seconds, contexts(2), 0, [EARLIER, 0], 0

    def clock(self) -> int:
        self.reads += 1
        return self.now

    def work(self) -> list[NDArray]:
        self.now += QUEUE
        self.done = [max(done, self.now) + seconds for done, seconds in zip(self.done, self.seconds)]
        return [nd.zeros(1, ctx=c) for c in self.ctx]

    def on_wait(self, context: Context | None) -> None:
        self.now = max([self.now, *(done for done, c in zip(self.done, self.ctx) if context in (None, c))])


def timing(answer: Answer) -> None:
    for seconds in ((10, 30), (30, 10)):
        devices = Devices(seconds)
        with recording(devices.on_wait):
            found = float(answer(devices.work, devices.clock))
        right = QUEUE + max(seconds)
        mistakes: dict[float, str] = {
            QUEUE: "times-queue",
            EARLIER + seconds[0]: "earlier-work",
            QUEUE + min(seconds): "waits-for-one",
            max(seconds): "starts-late",
        }
        case = (
            f"work of {seconds[0]} s and {seconds[1]} s on two devices, {QUEUE} s to queue; the first device is still "
            f"busy for {EARLIER} s\nexpected  {right} s\nfound     {found:g} s"
        )
        if devices.reads < 2:
            raise Mistake("no-clock", case)
        if found != right:
            raise Mistake(mistakes.get(found, "wrong-result"), case)


def overlap(answer: Answer) -> None:
    host, device = contexts(2)
    parts = [nd.full((2,), i + 1, ctx=device) for i in range(3)]
    with recording() as events:

        def compute(part: NDArray) -> NDArray:
            events.append("compute")
            return part * 10

        results = answer(parts, compute, host)
    done = [event if event == "compute" else "copy" if isinstance(event, Copy) else "wait" for event in events]
    case = f"{len(parts)} parts; what the function did: {', '.join(done) or 'nothing'}"
    waits, last = "wait" in done, len(done) - 1 - done[::-1].index("wait") if "wait" in done else -1
    if "compute" in done[done.index("wait") if waits else len(done) :]:
        raise Mistake("waits-in-loop", case)
    if "copy" in done[done.index("wait") if waits else len(done) :]:
        raise Mistake("waits-before-copies", case)
    if done.count("copy") < len(parts) or {result.context for result in results} != {host}:
        raise Mistake("copies-missing", case)
    if not waits or "copy" in done[last:]:
        raise Mistake("returns-early", case)
    compare(case, values(results), values([part * 10 for part in parts]), {})
