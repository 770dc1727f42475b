import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from bench import machine, own_process, steps

from gluon_mgpu.runtime.errors import Error


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
    named = (steps.Subject("notebook", 2), steps.Subject("highlevel", 2), steps.Subject("highlevel", 2, without="both"))
    subjects = (*named, steps.EVALUATE[2], steps.RESNET18[2])
    results = steps.measure(subjects, rounds=1, steps=5)
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


def test_a_worker_that_is_not_done_in_time_is_ended_and_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "endless.py").write_text("import time; print(1, flush=True); time.sleep(600)")
    start = time.perf_counter()
    with pytest.raises(Error, match="^it was not done after 0.5 s: wait longer$"):
        own_process.last("it", "endless", seconds=0.5, advice="wait longer")
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize(
    "program, message",
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it failed: ended by signal 9: no message"),
        ("print('12 pears', flush=True); import time; time.sleep(60)", "it failed: it printed '12 pears'"),
        ("import sys; sys.stdout.buffer.write(bytes([255]))", "it failed: it printed '\ufffd'"),
        ("", "it failed: no message"),
        ("print(1); import sys; sys.exit('gone')", "it failed: gone"),
        ("from gluon_mgpu.runtime.errors import UsageError; raise UsageError('give 2')", "it: give 2"),
    ],
)
def test_a_worker_that_fails_leaves_one_line_and_no_process(program, message, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "failing.py").write_text(program)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    with pytest.raises(Error) as caught:
        list(own_process.lines("it", "failing"))
    assert str(caught.value) == message
    assert started[0].returncode is not None


def test_a_worker_ends_where_its_lines_are_not_read_any_more(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "endless.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    lines = own_process.lines("it", "endless")
    pid = next(lines)
    assert Path(f"/proc/{pid}").exists()
    lines.close()  # as Ctrl-C does
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_gets_the_settings_it_is_given_and_none_of_the_users(monkeypatch, tmp_path):
    for name, value in (("OMP_NUM_THREADS", "7"), ("MXNET_ENGINE_TYPE", "NaiveEngine"), ("UNRELATED", "kept")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = "import json, os; print(json.dumps(1)); print(json.dumps(dict(os.environ)))"
    (tmp_path / "environment_shown.py").write_text(program)
    first, found = own_process.lines("it", "environment_shown", settings={"OMP_NUM_THREADS": "3"})
    assert first == 1 and found["OMP_NUM_THREADS"] == "3" and found["UNRELATED"] == "kept"
    assert "MXNET_ENGINE_TYPE" not in found


def test_peak_memory_is_of_the_process_alone_and_not_of_the_one_that_started_it():
    large = np.ones(100_000_000)  # 800 MB
    program = "from bench import machine; print(machine.peak_mb())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert 5 < float(done.stdout) < 400 and machine.peak_mb() > large.nbytes / 2**20
