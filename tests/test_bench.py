from gluon_mgpu import bench


def test_ratios_are_of_runs_of_one_round_and_medians_of_those():
    subject, notebook = bench.Subject("scratch", 2), bench.Subject("notebook", 2)
    one = bench.Subject("scratch", 1, **bench.ONE_THREAD)
    times = {
        bench.Subject("notebook", 1): [70, 70, 70],
        notebook: [60, 30, 90],
        one: [40, 20, 50],
        subject: [20, 10, 45],
    }
    results = {s: [{"step_ms": ms, "peak_mb": 100} for ms in runs] for s, runs in times.items()}
    row = next(line for line in bench.step_table(results).splitlines() if line.startswith("scratch, 2 contexts "))
    # 256 examples in the median's 20 ms; 60/20, 30/10, 90/45 -> 3; 40/20, 20/10, 50/45 -> 2
    assert row.split()[3:] == ["20.0", "(10.0-45.0)", "12800", "3.00", "2.00", "100"]


def test_every_subject_trains_in_a_process_of_its_own_and_says_how_long_a_step_took():
    subjects = (bench.Subject("notebook", 2), bench.Subject("highlevel", 2), bench.EVALUATE[2])
    results = bench.measure(subjects, rounds=1, steps=10)
    for (run,) in results.values():
        assert 1 < run["step_ms"] < 10000 and 50 < run["peak_mb"] < 5000


def test_a_profile_names_the_convolutions_of_each_implementation():
    rows = [line.split() for line in bench.profile(steps=2).splitlines()]
    assert all(float(ms) > 0 for ms in next(row for row in rows if row[0] == "Convolution")[1:])
