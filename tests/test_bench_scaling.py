import struct

from bench import scaling


def result(cores=2):
    """LeNet in scratch, strong and weak, three rounds; the other rounds of each point are 10 times the first."""
    points = {("strong", 1): 40, ("strong", 2): 25, ("strong", 4): 30, ("strong", 8): 35}
    points.update({("weak", 1): 40, ("weak", 2): 50, ("weak", 4): 100, ("weak", 8): 160})
    runs = [
        {
            "impl": "scratch",
            "model": "lenet",
            "kind": kind,
            "contexts": k,
            "batch_size": 256 * (k if kind == "weak" else 1),
            "step_ms": [ms, 10 * ms, 10 * ms],
            "peak_mb": [100, 200, 300],
        }
        for (kind, k), ms in points.items()
    ]
    return {"rounds": 3, "cores": cores, "runs": runs}


def cells(lines, start):
    return next(line.split() for line in lines if line.startswith(start))


def test_efficiency_is_the_rate_beside_one_contexts_for_each_core_that_can_be_used():
    lines = scaling.table(result()).splitlines()
    strong, weak = (next(i for i, line in enumerate(lines) if f"{k} scaling " in line) for k in ("strong", "weak"))
    # 40 / 25 / 2; 40 / 30 / 2, since only 2 of 4 contexts have a core
    assert cells(lines[strong:], "2 contexts ")[6] == "0.80"
    assert cells(lines[strong:], "4 contexts ")[6] == "0.67"
    # 2 x 256 examples in 50 ms beside 256 in 40, on 2 cores; 8 x 256 in 160
    assert cells(lines[weak:], "2 contexts ")[6] == "0.80"
    assert cells(lines[weak:], "8 contexts ")[6] == "1.00"
    # with a core each, 4 contexts should be 4 times as fast
    assert cells(scaling.table(result(4)).splitlines(), "4 contexts ")[6] == "0.33"


def test_what_a_context_costs_beyond_the_cores_is_counted_from_as_many_contexts_as_cores():
    lines = scaling.table(result()).splitlines()
    # each round by itself: 35 / 25; (35 - 25) / 6 in the first round, 10 times that in the two others
    assert "8 contexts against 2: 1.40 (1.40-1.40) times as long; 16.67 ms a step for each context beyond 2" in lines
    assert any(line.startswith("4 contexts against 2: 1.20") for line in lines)
    goal = "LeNet, scratch, strong scaling, 8 contexts against 2: 1.40 (1.40-1.40); goal at most 1.1: not reached"
    assert goal in lines


def test_a_goal_is_reached_where_the_median_is_on_its_right_side():
    found = result()
    for run in found["runs"]:
        if run["kind"] == "strong":
            run["step_ms"] = {1: [40] * 3, 2: [20] * 3, 4: [20] * 3, 8: [22] * 3}[run["contexts"]]
    goals = [line for line in scaling.table(found).splitlines() if "goal" in line]
    assert len(goals) == 2 and all(line.endswith(": reached") for line in goals)


def test_a_machine_whose_cores_are_no_measured_number_has_no_cost_beyond_them():
    assert "times as long" not in scaling.table(result(3))


def test_weak_scaling_trains_k_times_the_batch_on_k_contexts_and_shares_the_point_of_one(monkeypatch):
    asked = []

    def measure(subjects, rounds, steps):
        asked.extend(subjects)
        return {s: [{"step_ms": 10.0 * s.size, "peak_mb": 1.0}] * rounds for s in subjects}

    monkeypatch.setattr(scaling.steps, "measure", measure)
    runs = scaling.run(("lenet", "resnet18"), (2, 4), rounds=3)["runs"]
    assert len(asked) == len(set(asked)) == 3 * 5  # three of implementation and model; 1, 2 and 4, and 2 and 4 weak
    assert {(r["model"], r["impl"]) for r in runs} == {
        ("lenet", "scratch"),
        ("lenet", "highlevel"),
        ("resnet18", "highlevel"),
    }
    for run in runs:
        size = {"lenet": 256, "resnet18": 64}[run["model"]] * (run["contexts"] if run["kind"] == "weak" else 1)
        assert run["batch_size"] == size and run["step_ms"] == [10.0 * size] * 3
    assert all(("OMP_NUM_THREADS", "1") in s.settings for s in asked if s.contexts == 1)


def test_a_weak_point_is_trained_with_the_larger_batch():
    small, large = (scaling._subject("highlevel", "lenet", kind, 8) for kind in ("strong", "weak"))
    measured = scaling.steps.measure((small, large), rounds=1, steps=40)
    assert measured[large][0]["step_ms"] > 3 * measured[small][0]["step_ms"]  # 8 times the work


def test_the_picture_is_a_png_for_any_number_of_contexts(tmp_path):
    found = result()
    for name, runs in (("all", found["runs"]), ("one", [r for r in found["runs"] if r["contexts"] == 1])):
        scaling.draw({**found, "runs": runs}, tmp_path / name)
        content = (tmp_path / name).read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", content[16:24])) > 300
