"""If a process of a run is killed or stopped, all others end, one line names it, and the run can be resumed.

`make test-faults` runs these tests and prints a table: the lost process, when it was lost, the seconds until every
process had ended, and what was left.
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
HOROVODRUNS = re.compile(r"Process name: (\d+)\s+Exit code: \d+")


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print(*("\n| " + " | ".join(row) + " |" for row in rows))


@pytest.mark.parametrize("engine, who, how, when", CASES)
def test_if_a_process_is_lost_all_end_one_line_names_it_and_the_run_goes_on(engine, who, how, when, tmp_path, table):
    folder, chance = tmp_path / "run", random.Random(f"{engine} {who} {how} {when}")
    args = ["--device", "cpu", "--dataset", "synthetic", "--limit", 4096, "--seed", 1]
    delay = {"starting": 0, "training": 0.3, "epoch": 0, "any": chance.uniform(0, 3), "later": chance.uniform(3, 6)}
    with runs.start(runs.command(engine, 2, *args, "--epochs", EPOCHS, "--out", folder)) as process:
        try:
            out, err = Lines(process.stdout), Lines(process.stderr)
            runs.wait(lambda: who in runs.processes(str(folder)))
            if when != "starting":
                out.wait("epoch 1" if when == "epoch" else "running on")
            time.sleep(delay[when])
            there = {**runs.processes(str(folder)), "launcher": process.pid}
            os.kill(there[who], getattr(signal, how))
            since = time.monotonic()
            runs.wait(lambda: process.poll() is not None and not runs.alive(there.values()), PROMISED)
            seconds = time.monotonic() - since
        finally:
            runs.end(process)
    err.reading.join(10)
    everything = "".join(err.seen)
    errors = runs.errors(everything)
    assert process.returncode not in (0, None)
    named = re.search(f"{who} .*was (lost|killed)|lost contact with (the )?{who}:", "".join(errors))
    by_horovodrun = engine == "horovod" and who[-1] in HOROVODRUNS.findall(everything)
    assert len(errors) <= 1 and (named or by_horovodrun), everything
    table.append([engine, who, how, when, f"{seconds:.1f} s", resumed(folder)])


def resumed(folder):
    """What was left of the run. It must be complete, and resuming it must work."""
    if not records.exists(folder):
        return "no checkpoint yet"
    before = records.last(folder)[3]
    options = {"dataset": "synthetic", "limit": 4096, "seed": 1, "epochs": len(before.history) + 1}
    scratch.train([0], 256, 0.2, device="cpu", resume=str(folder), **options)
    assert len(records.last(folder)[3].history) == options["epochs"]
    return f"resumed {before}"


class Lines:
    """The lines of a stream so far."""

    def __init__(self, stream):
        self.seen = []
        self.reading = threading.Thread(target=lambda: self.seen.extend(iter(stream.readline, "")), daemon=True)
        self.reading.start()

    def wait(self, text):
        runs.wait(lambda: any(text in line for line in list(self.seen)))
