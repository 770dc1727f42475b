"""`distributed`: what a step sends, and ratios by round."""

import sys

import pytest
import runs
from bench import distributed, harness

SIZES = (200, 25050, 102528, 1290)  # LeNet's layers


@pytest.mark.parametrize("kvstore", runs.ENGINES)
@pytest.mark.parametrize("exchange, copies", [(True, 1), pytest.param(False, 0, marks=pytest.mark.slow)])
def test_a_step_sends_and_receives_each_gradient_once_and_nothing_without_the_exchange(kvstore, exchange, copies):
    job = distributed.job(kvstore, exchange=exchange, impl="scratch", model="lenet", steps=10)
    found = harness.start("it", job)
    for name in ("sent_bytes", "received_bytes"):
        assert copies <= found[name] / (4 * sum(SIZES)) < copies + 0.05, name
    assert found["step_ms"] > 1


def test_each_way_is_measured_and_its_ratio_is_of_the_same_round(monkeypatch):
    ms = {}  # {subject: the times of its rounds that are left}
    launchers = set()

    def start(name, job):
        launchers.add(job.launcher[:3])
        local = job.arguments["kvstore"] == "local"
        rounds = ms.setdefault(name, iter((20.0, 30.0, 40.0) if local else (25.0, 60.0, 50.0)))  # ratios 0.8, 0.5, 0.8
        return {"step_ms": next(rounds), "sent_bytes": 2e6, "received_bytes": 4e6, "peak_mb": 1.0}

    monkeypatch.setattr(harness, "start", start)
    monkeypatch.setattr(distributed, "installed", lambda: ["horovod", "dist_sync"])
    lines = distributed.table(distributed.run(rounds=3)).splitlines()
    assert len(ms) == 3 * 5  # three networks; one process, and two kvstores with and without the exchange
    assert launchers == {(), *((sys.executable, "-m", launcher[0]) for launcher in distributed.LAUNCHERS.values())}
    rows = [line.split() for line in lines if line.startswith("dist_sync, 2 processes")]
    assert [row[-5:-1] for row in rows] == [["0.80", "(0.50-0.80)", "2.00,", "4.00"]] * 3
