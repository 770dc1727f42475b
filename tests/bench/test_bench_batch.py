"""What each row of `batch` compares, its arithmetic, and a step without the allreduce."""

import numpy as np
from bench import batch, harness, steps

from gluon_mgpu.training import datasets


def test_every_step_is_measured_once_with_one_thread_on_one_device(monkeypatch):
    asked = []

    def start(name, job):
        subject = job.arguments["subject"]
        asked.append(subject)
        assert (job.env.get("OMP_NUM_THREADS") == "1") == (subject.contexts == 1)
        return {"step_ms": subject.size / subject.contexts + subject.exchange, "python_ms": 1.0, "peak_mb": 1.0}

    monkeypatch.setattr(harness, "start", start)
    rows = batch.run(("lenet", "resnet18"), rounds=2)["rows"]
    assert len(asked) == 2 * len(set(asked)) == 2 * (5 + 4 + 4 + 3 + 2 + 2)  # 1 device, 2, 2 without allreduce
    assert [(row["model"], row["batch_size"]) for row in rows] == [
        *(("lenet", size) for size in (128, 256, 512, 1024)),
        *(("resnet18", size) for size in (32, 64)),
    ]
    for row in rows:
        n = row["batch_size"]
        assert [run["step_ms"] for run in row["runs"]] == [[ms] * 2 for ms in (n + 1, n / 2 + 1, n / 2, n / 2 + 1)]


def test_the_table_has_the_speed_up_and_the_lost_milliseconds():
    runs = [
        {"step_ms": [ms], "python_ms": [3.0], "peak_mb": [mb]} for ms, mb in ((40, 500), (22, 400), (25, 0), (32, 600))
    ]
    printed = batch.table({"rounds": 1, "rows": [{"model": "lenet", "batch_size": 256, "runs": runs}]})
    times, memory = [line.split() for line in printed.splitlines() if line.startswith("256")]
    assert times[1::2] == ["40.0", "32.0", "1.25", "2.0", "3.0", "7.0", "3.0"] and memory == ["256", "500", "600"]


def test_without_the_allreduce_each_replica_trains_on_its_own_shard(monkeypatch):
    made, build = [], harness.replicas
    monkeypatch.setattr(harness, "replicas", lambda *args, **options: made.append(build(*args, **options)) or made[-1])
    for subject in batch.compared("lenet", 256)[2:]:
        steps.trainer(subject)(datasets.synthetic(512, 100, seed=0), np.arange(512))
        first, second = ([array.asnumpy() for array in arrays.values()] for arrays in made[-1].arrays)
        assert all(map(np.array_equal, first, second)) == subject.exchange
