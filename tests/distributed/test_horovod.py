"""`make horovod`, and what is specific to Horovod."""

import os
import sys
import zipfile

import pytest
import runs
from runs import finished, write_program

from gluon_mgpu.distributed import workers

PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}"
WHEEL = f"gluon_mgpu/wheels/mxnet-1.9.1/horovod-0.28.1+gluon.mgpu.2-{PYTHON}-{PYTHON}-linux_x86_64.whl"
# What the script does up to the wheel, if Horovod is not installed yet.
BUILD = """
import build_horovod
from gluon_mgpu.runtime.errors import Error
try:
    print(build_horovod.wheel())
except Error as error:
    print(error)
"""


def run_script(program, **environment):
    environment = {"PYTHONPATH": str(runs.ROOT / "scripts"), **environment}
    return finished(sys.executable, "-c", program, env=environment, check=True).stdout.strip()


def built(folder, *programs):
    """What build_horovod.wheel() returns or says, with an empty cache, these programs, and no network."""
    for name in programs:
        write_program(folder / "bin" / name, "")
    cache = str(folder / "cache")
    return run_script(BUILD, XDG_CACHE_HOME=cache, PATH=str(folder / "bin"), PIP_NO_INDEX="1", HOME=cache)


@pytest.mark.parametrize("programs, packages", [("", "g++ make"), ("make", "g++"), ("g++", "make"), ("c++", "make")])
def test_missing_tools_are_one_line_with_their_packages_before_anything_is_fetched(tmp_path, programs, packages):
    said = built(tmp_path, *programs.split())
    assert said.count("\n") == 0 and f"apt-get install {packages})" in said
    assert not (tmp_path / "cache").exists()


def test_a_kept_wheel_is_used_unless_it_is_truncated_or_altered(tmp_path):
    kept = tmp_path / "cache" / WHEEL
    kept.parent.mkdir(parents=True)
    with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("horovod/__init__.py", "\n".join(map(str, range(1000))))
    assert built(tmp_path) == str(kept)  # there is no compiler: it was not built
    whole = kept.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:400] + b"????" + whole[404:]):
        kept.write_bytes(damaged)
        assert "g++" in built(tmp_path)


def test_a_build_that_fails_leaves_no_wheel_and_names_the_error_and_the_log(tmp_path):
    said = built(tmp_path, "g++", "make")
    (log,) = (tmp_path / "cache" / WHEEL).parent.iterdir()
    assert "ERROR: " in said and str(log) in said and said.count("\n") == 0
    assert "ERROR: " in log.read_text()


@runs.needs_horovod
def test_two_processes_of_horovodrun_sum_their_arrays():
    said = run_script("import build_horovod; print(build_horovod.check())", **os.environ)
    assert said == "Horovod 0.28.1 with MXNet 1.9.1: two processes summed an array with gloo"


@pytest.mark.parametrize("count", (1, 2, 3, 4, 5))
def test_workers_on_one_machine_are_pinned_to_different_cores_if_there_are_enough(count, monkeypatch):
    cores, found = {0, 2, 3, 5}, [{} for _ in range(count)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    for rank, threads in enumerate(found):
        monkeypatch.setattr(os, "sched_setaffinity", threads.__setitem__)
        workers.pin_to_cores(rank, lambda own: [own] * count)
    pinned = 1 < count <= len(cores)
    for threads in found:
        assert threads.keys() == ({int(thread) for thread in os.listdir("/proc/self/task")} if pinned else set())
    of_workers = [set().union(*threads.values()) for threads in found]
    assert not pinned or (set().union(*of_workers) == cores and sum(map(len, of_workers)) == len(cores))
