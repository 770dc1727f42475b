from gluon_mgpu.bench import steps


def test_ratios_are_of_runs_of_one_round_and_medians_of_those():
    subject, notebook = steps.Subject("scratch", 2), steps.Subject("notebook", 2)
    one = steps.Subject("scratch", 1, **steps.ONE_THREAD)
    times = {
        steps.Subject("notebook", 1): [70, 70, 70],
        notebook: [60, 30, 90],
        one: [40, 20, 50],
        subject: [20, 10, 45],
    }
    results = {s: [{"step_ms": ms, "peak_mb": 100} for ms in runs] for s, runs in times.items()}
    row = next(line for line in steps.step_table(results).splitlines() if line.startswith("scratch, 2 contexts "))
    # 256 examples in the median's 20 ms; 60/20, 30/10, 90/45 -> 3; 40/20, 20/10, 50/45 -> 2
    assert row.split()[3:] == ["20.0", "(10.0-45.0)", "12800", "3.00", "2.00", "100"]


def test_every_subject_trains_in_a_process_of_its_own_and_says_how_long_a_step_took():
    subjects = (steps.Subject("notebook", 2), steps.Subject("highlevel", 2), steps.EVALUATE[2], steps.RESNET18[2])
    results = steps.measure(subjects, rounds=1, steps=10)
    for (run,) in results.values():
        assert 1 < run["step_ms"] < 10000 and 50 < run["peak_mb"] < 5000


def test_a_profile_names_the_convolutions_of_each_implementation():
    rows = [line.split() for line in steps.profile(steps=2).splitlines()]
    assert all(float(ms) > 0 for ms in next(row for row in rows if row[0] == "Convolution")[1:])


def test_speed_ups_are_against_one_context_with_one_thread_of_the_same_implementation():
    times = dict(zip(steps.EVALUATE, ([30, 40, 20], [15, 20, 10], [10, 20, 20], [9, 9, 9], [5, 5, 5], [3, 3, 3])))
    results = {s: [{"step_ms": ms, "peak_mb": 100} for ms in runs] for s, runs in times.items()}
    rows = steps.speedup_table(results).splitlines()
    # 30/10, 40/20, 20/20 -> 2; 9/3 -> 3
    assert [row.split()[-2] for row in rows[2:]] == ["1.00", "2.00", "2.00", "1.00", "1.80", "3.00"]
