"""The arithmetic of efficiency, and what is measured for each point."""

import pytest
from bench import harness, scaling
from printed import pixels


def result(cores=2):
    """LeNet in scratch, strong and weak, three rounds; the other rounds of each point take 10 times the first."""
    points = {("strong", 1): 40, ("strong", 2): 25, ("strong", 4): 30, ("strong", 8): 35}
    points.update({("weak", 1): 40, ("weak", 2): 50, ("weak", 4): 100, ("weak", 8): 160})
    runs = [
        {
            **{"impl": "scratch", "model": "lenet", "kind": kind, "contexts": k},
            "batch_size": 256 * (k if kind == "weak" else 1),
            "step_ms": [ms, 10 * ms, 10 * ms],
            "peak_mb": [100, 200, 300],
        }
        for (kind, k), ms in points.items()
    ]
    return {"rounds": 3, "cores": cores, "runs": runs}


@pytest.mark.parametrize(
    "kind, contexts, cores, efficiency",
    [
        ("strong", 4, 2, 40 / 30 / 2),  # only 2 of 4 contexts have a core
        ("strong", 2, 4, 40 / 25 / 2),  # only 2 of 4 cores have a context
        ("weak", 8, 2, 1.0),  # 8 * 256 examples in 160 ms instead of 256 in 40: twice the speed
    ],
)
def test_efficiency_is_the_speed_relative_to_one_context_per_core_in_use(kind, contexts, cores, efficiency):
    runs = {run["contexts"]: run for run in result()["runs"] if run["kind"] == kind}
    found = scaling.efficiencies(runs[1], runs[contexts], cores)
    assert found == pytest.approx([efficiency] * 3)
    section = scaling.table(result(cores)).split(f"{kind} scaling")[1].split("\n\n")[0]
    row = next(line.split() for line in section.splitlines() if line.startswith(f"{contexts} contexts"))
    assert row[-3] == f"{efficiency:.2f}" and row[2] == str(runs[contexts]["step_ms"][1]) + ".0"


def test_nothing_in_the_picture_is_cut_off():
    assert pixels(scaling.draw, result()).std() > 0


@pytest.mark.parametrize("batch_size, points", [((), 5), ((32, 64), 9)])  # with 1, 2 and 4 contexts
def test_weak_scaling_trains_k_times_the_batch_and_each_point_is_measured_once(monkeypatch, batch_size, points):
    asked = []

    def start(name, job):
        subject = job.arguments["subject"]
        asked.append(subject)
        assert (job.env.get("OMP_NUM_THREADS") == "1") == (subject.contexts == 1)
        return {"step_ms": 10.0 * subject.size, "peak_mb": 1.0}

    monkeypatch.setattr(harness, "start", start)
    runs = scaling.run(("lenet", "resnet18"), (2, 4), batch_size, rounds=2, steps=10)["runs"]
    assert len(asked) == 2 * len(set(asked)) == 2 * 3 * points  # 3: scratch's LeNet and highlevel's two networks
    found = {(run["impl"], run["model"], run["kind"], run["contexts"], run["batch_size"]) for run in runs}
    assert found == {
        (impl, name, kind, k, size * (k if kind == "weak" else 1))
        for impl, name in [("scratch", "lenet"), ("highlevel", "lenet"), ("highlevel", "resnet18")]
        for size in batch_size or [{"lenet": 256, "resnet18": 64}[name]]
        for kind in ("strong", "weak")
        for k in (1, 2, 4)
    }
    assert all(run["step_ms"] == [10.0 * run["batch_size"]] * 2 for run in runs)
