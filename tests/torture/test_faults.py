"""If a process of a run is killed or stopped, all others end, one line names it, and the run can be resumed.

`make test-faults` runs these tests in a `Box` and prints, for each, the lost process, when it was lost, the seconds
until every process had ended, and what was left.
"""

import os
import random
import re
import signal
import time

import pytest
import runs

from gluon_mgpu.training import records

pytestmark = pytest.mark.faults
PROMISED = 30  # seconds
ROLES = {"dist_sync": ("worker 0", "worker 1", "server 0", "scheduler"), "horovod": ("worker 0", "worker 1")}
# {moment: (what the run has printed, the least and the most seconds afterward)}
MOMENTS = {
    "starting": (b"", (0, 0)),
    "training": (b"running on", (0.3, 0.3)),
    "epoch": (b"epoch 1", (0, 0)),
    "any": (b"running on", (0, 3)),
    "later": (b"running on", (3, 6)),
}
CASES = [
    pytest.param(engine, who, how, when, marks=runs.MARKS[engine])
    for engine, roles in ROLES.items()
    for who in roles
    for how, when in [*(("SIGKILL", moment) for moment in MOMENTS), ("SIGSTOP", "training")]
]
PLAN = {"dataset": "synthetic", "limit": 4096, "seed": 1, "epochs": 500, "workers": 2}
HOROVODRUNS = re.compile(r"Process name: (\d+)\s+Exit code: \d+")


@pytest.mark.parametrize("engine, who, how, when", CASES)
def test_if_a_process_is_lost_all_end_one_line_names_it_and_the_run_goes_on(engine, who, how, when, empty):
    printed, delay = MOMENTS[when]
    lost = []

    def lose(box, process, sent):
        runs.wait(lambda: who in runs.processes(str(box.out)))
        runs.wait(lambda: printed in (box.folder / "out").read_bytes())
        time.sleep(random.Random(f"{engine} {who} {how} {when}").uniform(*delay))
        os.kill(runs.processes(str(box.out))[who], getattr(signal, how))
        lost.append(time.monotonic())

    done = empty.go_on({**PLAN, "kvstore": engine}, faults=[lose])  # a box requires that no process is left
    seconds = time.monotonic() - lost[0]
    errors = runs.errors(done.err)
    assert done.status != 0 and seconds < PROMISED
    named = re.search(f"{who} .*was (lost|killed)|lost contact with (the )?{who}:", "".join(errors))
    by_horovodrun = engine == "horovod" and who[-1] in HOROVODRUNS.findall(done.err)
    assert len(errors) <= 1 and (named or by_horovodrun), done.err
    print(f"\n| {engine} | {who} | {how} | {when} | {seconds:.1f} s | {resumed(empty)} |")


def resumed(empty):
    """What was left of the run. It must be complete, and resuming it must work."""
    if not empty.check_checkpoint():
        return "no checkpoint yet"
    before = records.last(empty.out)[3]
    assert empty.train({"epochs": len(before.history) + 1}, "--resume", empty.out).status == 0
    assert len(records.last(empty.out)[3].history) == len(before.history) + 1
    return f"resumed {before}"
