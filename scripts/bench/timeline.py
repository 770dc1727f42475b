"""Records the operators of training steps with MXNet's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Spans = list[tuple[int, str, int, int]]  # (context, operator, start and end in microseconds), ordered by start


@contextmanager
def recorded() -> Iterator[Spans]:
    """Record the operators that run inside this context manager. Afterward, the list has them."""
    import mxnet as mx

    spans: Spans = []
    mx.nd.waitall()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "profile.json")
        # aggregate_stats keeps the engine from running several operators as one, which would hide their names.
        on = dict.fromkeys(("profile_imperative", "profile_symbolic", "aggregate_stats"), True)
        off = dict.fromkeys(("profile_api", "profile_memory", "continuous_dump"), False)
        mx.profiler.set_config(filename=str(file), **on, **off)
        mx.profiler.set_state("run")
        try:
            yield spans
            mx.nd.waitall()
        finally:
            mx.profiler.set_state("stop")
            mx.profiler.dump()
        # MXNet writes an extra comma into every profile of a process except the first profile.
        text = file.read_text().replace('"traceEvents": [\n,', '"traceEvents": [', 1)
    events = [e for e in json.loads(text)["traceEvents"] if e["ph"] in ("B", "E") and e["cat"] == "operator"]
    pairs = zip(events[::2], events[1::2])  # begin and end events alternate; a profile's processes are the contexts
    spans += sorted(((b["pid"], b["name"], b["ts"], e["ts"]) for b, e in pairs), key=lambda span: span[2])


def busy(spans: Spans, context: int, contexts: int) -> float:
    """The part of the time, from the first operator of the contexts to the end of their last, in which a context
    computes. If operators overlap, their time counts once."""
    ours = [span for span in spans if span[0] < contexts]
    total = done = 0
    for of, _, begin, end in ours:
        if of == context and end > done:
            total += end - max(begin, done)
            done = end
    return total / (max(end for *_, end in ours) - ours[0][2])
