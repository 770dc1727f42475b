"""A context that shares its core is slower, and gets less work."""

import os

import pytest
from bench import harness, shares
from bench.harness import Job

from gluon_mgpu.runtime.errors import UsageError


def test_one_core_is_not_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(UsageError):
        shares.run()


def test_the_table_has_a_row_per_way_to_split(monkeypatch):
    def start(name, job):
        chosen, busy = job.arguments["shares"], job.arguments["programs"] > 0
        return {"step_ms": 80.0 if busy else 30.0, "shares": [78, 22] if chosen == "auto" else chosen}

    monkeypatch.setattr(harness, "start", start)
    rows = [line.split() for line in shares.table(shares.run(rounds=2)).splitlines()[-4:]]
    assert [" ".join(row) for row in rows] == [
        "cpu(0) alone 30.0 (30.0-30.0) 80.0 (80.0-80.0)",
        "equal shards 30.0 (30.0-30.0) 50:50 80.0 (80.0-80.0) 50:50",
        "shares 80,20 30.0 (30.0-30.0) 80:20 80.0 (80.0-80.0) 80:20",
        "shares auto 30.0 (30.0-30.0) 78:22 80.0 (80.0-80.0) 78:22",
    ]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs 2 cores")
def test_programs_on_the_core_of_the_second_context_make_its_share_smaller():
    job = Job("shares", {"shares": "auto", "programs": 3, "steps": 10}, harness.environment(harness.ONE_THREAD))
    first, second = harness.start("auto", job)["shares"]
    assert first > 1.5 * second
