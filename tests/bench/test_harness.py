"""Workers and their failures, rounds, and the arithmetic of tables."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from bench import cli, harness, steps
from bench.harness import Job
from click.testing import CliRunner
from own_process import finished
from printed import error

from gluon_mgpu.runtime.errors import Error, UsageError

SCRIPT = Path(__file__).parents[2] / "scripts/bench.py"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """A function that adds a module to a copy of `bench`, for workers."""
    shutil.copytree(SCRIPT.parent / "bench", tmp_path / "bench")
    monkeypatch.setattr(harness, "SCRIPTS", tmp_path)
    return lambda name, code: (tmp_path / f"bench/{name}.py").write_text(code)


@pytest.mark.parametrize(
    "code, kind",
    [
        ("def work(): print('12 pears')", Error),
        ("def work(): pass", Error),
        ("from gluon_mgpu.runtime.errors import UsageError; raise UsageError(None, None, 'use 2')", UsageError),
    ],
)
def test_a_worker_that_fails_is_one_error_line_that_names_it(code, kind, bench):
    bench("failing", code)
    with pytest.raises(Error) as caught:
        harness.start("this subject", Job("failing", {}))
    assert type(caught.value) is kind
    assert "this subject" in str(caught.value) and "\n" not in str(caught.value)


def test_a_worker_gets_its_settings_and_none_of_the_users(monkeypatch, bench):
    for name, value in (("OMP_NUM_THREADS", "7"), ("MXNET_ENGINE_TYPE", "NaiveEngine"), ("UNRELATED", "kept")):
        monkeypatch.setenv(name, value)
    bench("environment_shown", "import os\ndef work(): return dict(os.environ)")
    found = harness.start("it", Job("environment_shown", {}, harness.environment({"OMP_NUM_THREADS": "3"})))
    assert (found["OMP_NUM_THREADS"], found["UNRELATED"]) == ("3", "kept")
    assert "MXNET_ENGINE_TYPE" not in found


def test_a_spread_is_the_median_the_least_and_the_most():
    assert harness.spread([3, 1, 2.26], 1) == "2.3 (1.0-3.0)"
    assert harness.spread([1234.5, 0.0123, 45.67]) == "45.7 (0.012-1234)"


def test_each_round_measures_every_subject_once_and_ratios_are_those_of_runs_of_one_round(monkeypatch):
    times = {"notebook, 2 contexts": [60, 30, 90], "scratch, 2 contexts": [20, 10, 45]}
    left, started = {name: iter(ms) for name, ms in times.items()}, []

    def start(name, job):
        started.append(name)
        return {"step_ms": next(left[name]) if name in left else 100, "peak_mb": 100}

    monkeypatch.setattr(harness, "start", start)
    lines = steps.table(steps.run(["step"])).splitlines()
    row = next(line.split() for line in lines if line.startswith("scratch, 2 contexts "))
    assert started == list(dict.fromkeys(started)) * 3
    # 256 examples in the median's 20 ms; 60/20, 30/10, 90/45 -> 3
    assert row[3:] == ["20.0", "(10.0-45.0)", "12800", "3.00", "(2.00-3.00)", "100"]


def test_peak_memory_is_of_the_process_alone_and_not_of_the_one_that_started_it():
    large = np.ones(40_000_000)  # 320 MB
    code = f"import sys; sys.path.append({str(SCRIPT.parent)!r}); from bench import harness; print(harness.peak_mb())"
    done = finished(sys.executable, "-c", code)
    assert 5 < float(done.stdout) < 160 and harness.peak_mb() > large.nbytes / 2**20


def test_the_facts_name_the_processor_and_its_instruction_sets(monkeypatch):
    cpuinfo = Path("/proc/cpuinfo").read_text()
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    name = harness.processor()  # in the names of files
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    found, line = harness.facts(), harness.machine_line()
    assert found["cpu"] in cpuinfo and found["cpu"] in line and "DNNL_MAX_CPU_ISA=AVX2" in line
    assert harness.processor() == f"{name}-avx2" and re.fullmatch("[a-z0-9-]+", name)
    for flag, name in (("avx2", "avx2"), ("avx512f", "avx512"), ("amx_tile", "amx")):
        there = bool(re.search(rf"\b{flag}\b", cpuinfo))
        assert (name in found["instruction_sets"]) == there == (name in re.findall(r"\w+", line.split(" of ")[1]))


def test_a_result_is_written_as_json_with_the_machine_and_as_a_picture(tmp_path):
    draw = lambda result, file: file.write(b"a picture")  # noqa: E731
    harness.create(tmp_path / "new/folder")
    harness.write(tmp_path / "new/folder", "it", {"ms": [1.0, 2.0]}, draw)
    kept = json.loads((tmp_path / "new/folder/it.json").read_text())
    assert kept["ms"] == [1.0, 2.0] and kept["machine"]["cores"] >= 1
    assert (tmp_path / "new/folder/it.png").read_bytes() == b"a picture"
    (tmp_path / "file").write_text("")
    with pytest.raises(Error):
        harness.create(tmp_path / "file")


@pytest.mark.slow
def test_every_trainer_starts_with_the_same_weights_and_learns_alike():
    found = [harness.start(impl, steps.Subject(impl, 2).job(steps=10)) for impl in ("scratch", "highlevel")]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert found[0]["loss"] == pytest.approx(math.log(10), rel=0.01)  # weights are small, so scores are nearly equal
    assert all(1 < run["step_ms"] < 60000 and 50 < run["peak_mb"] < 5000 for run in found)


def test_bench_is_a_script_whose_subcommands_have_help():
    done = finished(sys.executable, SCRIPT, "-h")
    assert done.returncode == 0 and all(name in done.stdout for name in cli.bench.commands)
    for name in cli.bench.commands:
        assert CliRunner().invoke(cli.bench, [name, "-h"]).exit_code == 0


@pytest.mark.parametrize("options", [["steps", "--rounds", "1"], ["timeline", "--contexts", "0"]])
def test_a_wrong_command_is_one_line_and_status_2(options, capfd):
    error(capfd, cli.bench, *options)
