"""`distributed`: what a step sends, ratios by round, and the options of its two measurements."""

import io

import pytest
import runs
from bench import compression, distributed, harness

SIZES = (200, 25050, 102528, 1290)  # LeNet's layers


@pytest.mark.parametrize("kvstore", runs.ENGINES)
def test_a_step_sends_each_gradient_once_and_receives_it_once(kvstore):
    job = distributed.job("distributed", kvstore, exchange=True, impl="scratch", model="lenet", steps=10)
    found = harness.start("it", job)
    for name in ("sent_bytes", "received_bytes"):
        assert 1 < found[name] / (4 * sum(SIZES)) < 1.05, name
    assert found["step_ms"] > 1


@pytest.mark.slow
def test_without_the_exchange_nothing_is_summed():
    job = distributed.job("distributed", "dist_sync", exchange=False, impl="highlevel", model="lenet", steps=10)
    found = harness.start("it", job)
    assert found["sent_bytes"] < 0.05 * 4 * sum(SIZES)


def test_each_way_is_measured_and_its_ratio_is_of_the_same_round(monkeypatch):
    started = []

    def start(name, job):
        started.append(job)
        local = job.arguments["kvstore"] == "local"
        seconds = (20.0, 30.0, 40.0) if local else (25.0, 60.0, 50.0)  # 0.8, 0.5, 0.8
        ms = seconds[(len(started) - 1) // (len(started_per_round))]
        return {"step_ms": ms, "sent_bytes": 2e6, "received_bytes": 4e6, "peak_mb": 1.0}

    started_per_round = range(3 * 5)  # three networks; one process, and two kvstores with and without the exchange
    monkeypatch.setattr(harness, "start", start)
    monkeypatch.setattr(distributed, "installed", lambda: (("horovod", "dist_sync"), ["a line"]))
    result = distributed.run(rounds=3)
    assert len(started) == 3 * len(started_per_round)
    assert {job.launcher[:3] for job in started} == {
        (),
        *((distributed.sys.executable, "-m", launcher[0]) for launcher in distributed.LAUNCHERS.values()),
    }
    lines = distributed.table(result).splitlines()
    rows = [line.split() for line in lines if line.startswith("dist_sync, 2 processes")]
    assert [row[-5:-1] for row in rows] == [["0.80", "(0.50-0.80)", "2.00,", "4.00"]] * 3 and "a line" in lines
    picture = io.BytesIO()
    distributed.draw(result, picture)
    assert picture.getvalue().startswith(b"\x89PNG")


def test_compression_has_a_row_per_kind_with_the_medians_over_the_seeds(monkeypatch):
    def start(name, job):
        seed = job.arguments["seed"]
        accuracy = {1: 0.5, 2: 0.7, 3: 0.6}[seed]
        return {"accuracy": accuracy, "epoch_s": 2.0 * seed, "sent_bytes": 1e6 * seed, "received_bytes": 4e6}

    monkeypatch.setattr(harness, "start", start)
    monkeypatch.setattr(distributed, "installed", lambda: (("horovod", "dist_sync"), []))
    monkeypatch.setattr(compression.datasets, "find", lambda name: "there")
    result = compression.run(rounds=3, epochs=2)
    lines = compression.table(result).splitlines()
    for kvstore, kinds in compression.KINDS.items():
        for kind in kinds:
            row = next(line for line in lines if line.startswith(f"{kvstore}, {kind or 'no compression'}"))
            assert row.split()[-6:] == ["2.00,", "4.00", "4.0", "(2.0-6.0)", "0.600", "(0.500-0.700)"]
    picture = io.BytesIO()
    compression.draw(result, picture)
    assert picture.getvalue().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("compress, share", [(None, 1), ("2bit:0.5", 1 / 16)])
def test_two_bits_per_number_send_a_sixteenth_of_the_gradients(compress, share):
    job = distributed.job("compression", "dist_sync", compress=compress, epochs=1, limit=2560, seed=1)
    assert harness.start("it", job)["sent_bytes"] == pytest.approx(4 * sum(SIZES) * share, rel=0.05)
