import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import runs

SCRIPT = Path(__file__).parents[1] / "scripts" / "build_horovod.py"
# What the script does where Horovod is not installed yet, up to the wheel.
WHEEL = f"""
import importlib.util
import json
found = importlib.util.spec_from_file_location("build_horovod", {str(SCRIPT)!r})
script = importlib.util.module_from_spec(found)
found.loader.exec_module(script)
from gluon_mgpu.runtime.errors import Error
try:
    print(script.wheel())
except Error as error:
    print(error)
"""
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: make horovod"
)


def wheel(cache, path):
    """What script.wheel() gives, or says, with this cache and PATH, and where nothing can be downloaded."""
    alone = {"XDG_CACHE_HOME": str(cache), "PATH": str(path), "PIP_NO_INDEX": "1", "HOME": str(cache)}
    done = subprocess.run([sys.executable, "-c", WHEEL], env=alone, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def folder_with(tmp_path, *names):
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("there", "packages"), [((), "g++ make"), (("make",), "g++"), (("g++",), "make"), (("c++",), "make")]
)
def test_where_the_tools_are_missing_one_line_names_their_packages_before_anything_is_fetched(
    tmp_path, there, packages
):
    cache = tmp_path / "cache"
    said = wheel(cache, folder_with(tmp_path, *there))
    assert said.count("\n") == 0 and said.endswith(f"apt-get install {packages})")
    assert not cache.exists()


def test_a_built_wheel_is_used_again_and_one_that_was_cut_off_or_altered_is_not(tmp_path):
    nothing = folder_with(tmp_path)
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    name = f"horovod-0.28.1+gluon.mgpu.2-{python}-{python}-linux_x86_64.whl"
    built = tmp_path / "cache" / "gluon_mgpu" / "wheels" / "mxnet-1.9.1" / name
    built.parent.mkdir(parents=True)
    with zipfile.ZipFile(built, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("horovod/__init__.py", "\n".join(map(str, range(1000))))
    assert wheel(tmp_path / "cache", nothing) == str(built)  # without a compiler: it was not built
    whole = built.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:400] + b"????" + whole[404:]):
        built.write_bytes(damaged)
        assert "g++ and make cannot be found" in wheel(tmp_path / "cache", nothing)


def test_a_build_that_fails_leaves_no_wheel_and_names_the_error_and_the_log(tmp_path):
    said = wheel(tmp_path / "cache", folder_with(tmp_path, "g++", "make"))  # no index to fetch from
    folder = tmp_path / "cache" / "gluon_mgpu" / "wheels" / "mxnet-1.9.1"
    (log,) = folder.iterdir()
    assert "Horovod does not build: ERROR: " in said and str(log) in said and said.count("\n") == 0
    assert "ERROR: " in log.read_text()


@needs_horovod
def test_two_processes_of_horovodrun_sum_their_arrays():
    script = f"{WHEEL.partition('from gluon')[0]}\nprint(script.check())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "Horovod 0.28.1 with MXNet 1.9.1: two processes summed an array over gloo\n", done.stderr


SAYS_ITS_CORES = """
import json, os
from gluon_mgpu.distributed import workers

with workers.join("horovod") as group:
    cores = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
    found = group.gather(cores)
    if group.rank == 0:
        print("found", json.dumps(found))
"""


@needs_horovod
@pytest.mark.parametrize("count", (2, 3))
def test_all_threads_of_a_worker_have_cores_of_their_own_where_there_are_enough(tmp_path, count):
    program = tmp_path / "program.py"
    program.write_text(SAYS_ITS_CORES)
    status, out, err = runs.run("horovod", count, program=[sys.executable, str(program)])
    assert status == 0, err
    found = json.loads(out.split("found", 1)[1])
    cores = os.sched_getaffinity(0)
    taken = set()
    for threads in found:
        own = set(threads[0])
        assert all(set(thread) == own for thread in threads)
        if count <= len(cores):
            assert len(own) in (len(cores) // count, -(-len(cores) // count)) and not own & taken
        else:
            assert own == cores
        taken |= own
    assert taken == cores
