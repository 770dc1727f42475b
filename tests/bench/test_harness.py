"""Workers and their failures, rounds, and the arithmetic of tables."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from bench import harness
from bench.harness import Job
from own_process import finished

from gluon_mgpu.runtime.errors import Error, UsageError

SCRIPT = Path(__file__).parents[2] / "scripts/bench.py"


@pytest.mark.parametrize(
    "code, kind",
    [
        ("def work(): print('12 pears')", Error),
        ("def work(): pass", Error),
        ("from gluon_mgpu.runtime.errors import UsageError; raise UsageError(None, None, 'use 2')", UsageError),
    ],
)
def test_a_worker_that_fails_is_one_error_line_that_names_it(code, kind, monkeypatch, tmp_path):
    shutil.copytree(SCRIPT.parent / "bench", tmp_path / "bench")
    monkeypatch.setattr(harness, "SCRIPTS", tmp_path)
    (tmp_path / "bench/failing.py").write_text(code)
    with pytest.raises(Error) as caught:
        harness.start("this subject", Job("failing", {}))
    assert type(caught.value) is kind
    assert "this subject" in str(caught.value) and "\n" not in str(caught.value)


def test_each_round_measures_every_subject_once_and_ratios_are_those_of_runs_of_one_round(monkeypatch):
    times = {"notebook": [60, 30, 90], "scratch": [20, 10, 45], "highlevel": [20, 20, 20]}
    left, started = {name: iter(ms) for name, ms in times.items()}, []

    def start(name, job):
        started.append(name)
        return {"step_ms": next(left[name])}

    monkeypatch.setattr(harness, "start", start)
    measured = harness.measure(dict.fromkeys(times, Job("it", {})), rounds=3)
    assert started == [*times] * 3 and measured == {name: {"step_ms": ms} for name, ms in times.items()}
    assert harness.ratios(measured["notebook"], measured["scratch"]) == [3, 3, 2]


def test_peak_memory_is_of_the_process_alone_and_not_of_the_one_that_started_it():
    large = np.ones(40_000_000)  # 320 MB
    code = f"import sys; sys.path.append({str(SCRIPT.parent)!r}); from bench import harness; print(harness.peak_mb())"
    done = finished(sys.executable, "-c", code)
    assert 5 < float(done.stdout) < 160 and harness.peak_mb() > large.nbytes / 2**20
