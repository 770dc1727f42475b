"""A process of a run is killed, or stops answering: what the others do, and what is left. `make test-faults`.

Prints a table: who was lost, when, how long until every process had ended, what was said, what resume gave.
"""

import os
import random
import re
import signal
import threading
import time

import pytest
import runs

from gluon_mgpu import scratch
from gluon_mgpu.training import records

pytestmark = pytest.mark.faults
PROMISED = 30  # seconds
EPOCHS = 500
ROLES = {"dist_sync": ("worker 0", "worker 1", "server 0", "scheduler"), "horovod": ("worker 0", "worker 1")}
MOMENTS = ("starting", "training", "epoch", "any", "later")
CASES = [
    pytest.param(engine, who, how, when, marks=runs.MARKS[engine])
    for engine, roles in ROLES.items()
    for who in roles
    for how, when in [*(("SIGKILL", moment) for moment in MOMENTS), ("SIGSTOP", "training")]
]


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    print()
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


@pytest.mark.parametrize("engine, who, how, when", CASES)
def test_every_process_ends_and_says_who_was_lost_and_the_run_goes_on(engine, who, how, when, tmp_path, table):
    folder, chance = tmp_path / "run", random.Random(f"{engine} {who} {how} {when}")
    args = ["--device", "cpu", "--dataset", "synthetic", "--limit", 4096, "--seed", 1]
    line = runs.command(engine, 2, *args, "--epochs", EPOCHS, "--out", folder)
    with runs.start(line) as process:
        try:
            out, err = Lines(process.stdout), Lines(process.stderr)
            runs.wait(lambda: who in runs.processes(str(folder)))
            if when != "starting":
                out.wait("epoch 1" if when == "epoch" else "running on")
                time.sleep(
                    {"training": 0.3, "epoch": 0, "any": chance.uniform(0, 3), "later": chance.uniform(3, 6)}[when]
                )
            there = {**runs.processes(str(folder)), "launcher": process.pid}
            os.kill(there[who], getattr(signal, how))
            since = time.monotonic()
            runs.wait(lambda: process.poll() is not None and not runs.alive(there.values()), PROMISED)
            seconds = time.monotonic() - since
        finally:
            runs.end(process)
    err.reading.join(10)
    everything = "".join(err.seen)
    said = runs.lines(everything)
    said += [
        " ".join(found.split()) for found in re.findall(r"Process name: \d+\s+Exit code: \d+", everything)
    ]  # horovodrun's
    lost = re.compile(f"{who}.* was (lost|killed)|Process name: {who[-1]} Exit")
    named = [line for line in said if lost.search(line)]
    table.append([engine, who, how, when, f"{seconds:.1f} s", named[0] if named else "-", resumed(folder)])
    assert seconds < PROMISED and process.returncode not in (0, None)
    assert named, everything


def resumed(folder):
    """What is left of the run, which must be whole, and that it goes on."""
    if not folder.is_dir():
        return "no run yet"
    before = records.last(folder)[3]
    scratch.train([0], 256, 0.2, device="cpu", resume=str(folder), **options(before))
    after = records.last(folder)[3]
    assert len(after.history) == len(before.history) + 1
    return f"went on after {before}"


def options(position):
    return {"dataset": "synthetic", "limit": 4096, "seed": 1, "epochs": len(position.history) + 1}


class Lines:
    """What a stream has given so far."""

    def __init__(self, stream):
        self.seen = []
        self.reading = threading.Thread(target=lambda: self.seen.extend(iter(stream.readline, "")), daemon=True)
        self.reading.start()

    def wait(self, text):
        runs.wait(lambda: any(text in line for line in list(self.seen)))
