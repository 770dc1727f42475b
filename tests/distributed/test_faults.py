"""If a process of a run is killed or stopped, all others end, one line names it, and the run can be resumed.

`make test-faults` runs these tests and prints a table: the lost process, when it was lost, the seconds until every
process had ended, and what was left.
"""

import os
import random
import re
import signal
import time

import pytest
import runs

from gluon_mgpu import scratch
from gluon_mgpu.training import records

pytestmark = pytest.mark.faults
PROMISED = 30  # seconds
ROLES = {"dist_sync": ("worker 0", "worker 1", "server 0", "scheduler"), "horovod": ("worker 0", "worker 1")}
# {moment: (what the run has printed, seconds afterward)}
MOMENTS = {
    "starting": ("", (0, 0)),
    "training": ("running on", (0.3, 0.3)),
    "epoch": ("epoch 1", (0, 0)),
    "any": ("running on", (0, 3)),
    "later": ("running on", (3, 6)),
}
CASES = [
    pytest.param(engine, who, how, when, marks=runs.MARKS[engine])
    for engine, roles in ROLES.items()
    for who in roles
    for how, when in [*(("SIGKILL", moment) for moment in MOMENTS), ("SIGSTOP", "training")]
]
DATA = {"dataset": "synthetic", "limit": 4096, "seed": 1, "device": "cpu"}
HOROVODRUNS = re.compile(r"Process name: (\d+)\s+Exit code: \d+")


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print(*("\n| " + " | ".join(row) + " |" for row in rows))


@pytest.mark.parametrize("engine, who, how, when", CASES)
def test_if_a_process_is_lost_all_end_one_line_names_it_and_the_run_goes_on(engine, who, how, when, tmp_path, table):
    folder, (printed, delay) = tmp_path / "run", MOMENTS[when]
    args = [f"--{name}={value}" for name, value in DATA.items()]
    with runs.start(runs.command(engine, 2, *args, "--epochs=500", "--out", folder)) as process:
        try:
            runs.wait(lambda: who in runs.processes(str(folder)))
            while printed and printed not in process.stdout.readline():
                assert process.poll() is None
            time.sleep(random.Random(f"{engine} {who} {how} {when}").uniform(*delay))
            there = {**runs.processes(str(folder)), "launcher": process.pid}
            os.kill(there[who], getattr(signal, how))
            since = time.monotonic()
            _, said = process.communicate(timeout=PROMISED)
            runs.wait(lambda: not runs.alive(there.values()), PROMISED)
            seconds = time.monotonic() - since
        finally:
            runs.end(process)
    errors = runs.errors(said)
    assert process.returncode != 0 and seconds < PROMISED
    named = re.search(f"{who} .*was (lost|killed)|lost contact with (the )?{who}:", "".join(errors))
    by_horovodrun = engine == "horovod" and who[-1] in HOROVODRUNS.findall(said)
    assert len(errors) <= 1 and (named or by_horovodrun), said
    table.append([engine, who, how, when, f"{seconds:.1f} s", resumed(folder)])


def resumed(folder):
    """What was left of the run. It must be complete, and resuming it must work."""
    if not records.exists(folder):
        return "no checkpoint yet"
    before = records.last(folder)[3]
    scratch.train([0], 256, 0.2, resume=str(folder), epochs=len(before.history) + 1, **DATA)
    assert len(records.last(folder)[3].history) == len(before.history) + 1
    return f"resumed {before}"
