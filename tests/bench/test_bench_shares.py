"""A context that shares its core is slower, and gets less work."""

import os
import sys

import pytest
from bench import harness, shares
from own_process import finished

from gluon_mgpu.runtime.errors import UsageError


def test_one_core_is_not_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(UsageError):
        shares.run()


def test_the_table_has_a_row_per_way_to_split(monkeypatch):
    def start(name, job):
        chosen, busy = job.arguments["shares"], "seq 3" in job.launcher[2]
        return {"step_ms": 80.0 if busy else 30.0, "shares": [78, 22] if chosen == "auto" else chosen}

    monkeypatch.setattr(harness, "start", start)
    rows = [line.split() for line in shares.table(shares.run(rounds=2)).splitlines()[-4:]]
    assert [" ".join(row) for row in rows] == [
        "cpu(0) alone 30.0 (30.0-30.0) 80.0 (80.0-80.0)",
        "equal shards 30.0 (30.0-30.0) 50:50 80.0 (80.0-80.0) 50:50",
        "shares 80,20 30.0 (30.0-30.0) 80:20 80.0 (80.0-80.0) 80:20",
        "shares auto 30.0 (30.0-30.0) 78:22 80.0 (80.0-80.0) 78:22",
    ]


AFFINITIES = """
import os
from bench import shares

shares.work([80, 20], steps=10)
print(*({*os.sched_getaffinity(int(thread))} for thread in os.listdir("/proc/self/task")), sep=";")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 cores")
def test_each_context_stays_on_a_core_of_its_own_and_python_on_none():
    done = finished(sys.executable, "-c", AFFINITIES, env=harness.environment(harness.ONE_THREAD), check=True)
    cores, own = os.sched_getaffinity(0), sorted(os.sched_getaffinity(0))[:2]
    threads = [set(map(int, text.strip("{}").split(","))) for text in done.stdout.strip().split(";")]
    assert {own[0]} in threads and threads.count({own[1]}) == 1 and cores in threads
