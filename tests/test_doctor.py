"""Each finding with its cause: a bare environment, a loader that is blind, stand-ins for drivers and packages."""

import gzip
import hashlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import venv
from pathlib import Path

import click
import numpy as np
import pytest

from gluon_mgpu.commands.common import doctor
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import datasets

ROOT = Path(__file__).parents[1]
MARKS = ("ok", "note", "problem")
TINY = "--dataset=synthetic --limit=100 --epochs=1".split()


def run(program, *arguments, python=sys.executable, **environment):
    return subprocess.run(
        [python, *program, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def examine(*arguments, **options):
    return run([ROOT / "scripts" / "doctor.py"], *arguments, **options)


def only(done, mark):
    """What the lines of a mark say."""
    return [line[9:] for line in done.stdout.splitlines() if line.split()[0] == mark]


def module(folder, name, code):
    path = folder / f"{name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def bare(tmp_path):
    """The interpreter of a new environment that has click and this package, and no other; and where more can be put."""
    venv.create(tmp_path / "bare", symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    os.symlink(Path(click.__file__).parent, packages / "click")
    os.symlink(ROOT / "gluon_mgpu", packages / "gluon_mgpu")
    return str(tmp_path / "bare" / "bin" / "python"), packages


def test_a_machine_that_runs_the_suite_can_run_the_main_job_and_the_last_line_says_so():
    # DMLC_ROLE: also where the environment is that of a server, which would never end.
    done = run(["-m", "gluon_mgpu", "doctor"], GLUON_MGPU_DATA="", MXNET_HOME="/nonexistent", DMLC_ROLE="server")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, lines[-1]) == (0, "", "can run train --impl scratch --gpus 2")
    assert all(line.split()[0] in MARKS and line[8] == " " for line in lines[:-1]) and not only(done, "problem")
    assert f"NumPy {np.__version__}" in only(done, "ok")
    assert lines[-2].startswith("ok       a trial with 512 synthetic examples ends well, running on: [")
    assert "\x1b" not in done.stdout


def test_without_numpy_and_mxnet_it_runs_and_says_what_to_install(bare):
    python, packages = bare
    done = examine(python=python, PYTHONPATH=str(packages))
    assert (done.returncode, done.stderr) == (1, "")
    numpy, mxnet = only(done, "problem")
    assert numpy == "NumPy is not installed: `pip install 'numpy>=1.22'`"
    assert mxnet == "MXNet is not installed: `make install`, or `pip install --no-deps mxnet==1.9.1`"
    assert "data was not looked for, which needs NumPy" in only(done, "note")
    assert done.stdout.endswith("cannot run train --impl scratch --gpus 2: 2 problems above\n")


def test_the_installed_command_reaches_it_where_the_other_commands_cannot_be_imported(bare):
    python, packages = bare
    command = ["-c", "import sys; from gluon_mgpu.__main__ import main; sys.exit(main())"]
    done = run(command, "doctor", python=python, PYTHONPATH=str(packages))
    assert (done.returncode, len(only(done, "problem"))) == (1, 2)
    assert one_line(run(command, "train", "--help", python=python, PYTHONPATH=str(packages)))


def one_line(done):
    """The error of a command that ended with status 1 and one line."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr[7:].strip()


COMMANDS = [path.stem for path in sorted((ROOT / "scripts").glob("*.py")) if "from start" in path.read_text()]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "doctor"])
def test_a_command_without_numpy_says_in_one_line_which_python_lacks_it(bare, command):
    python, packages = bare
    for program in ([ROOT / "scripts" / f"{command}.py"], ["-m", "gluon_mgpu", command]):
        says = one_line(run(program, python=python, PYTHONPATH=str(packages)))
        assert says.startswith(
            f"numpy is not installed for {python}: use .venv/bin/python, which `make install` sets up"
        )
        assert says.endswith("`pip install numpy`")


def test_without_click_or_the_package_itself_each_command_says_so_in_one_line(bare):
    python, packages = bare
    (packages / "click").unlink()
    for command in ("train", "doctor"):
        script = [ROOT / "scripts" / f"{command}.py"]
        assert one_line(run(script, python=python, PYTHONPATH=str(packages))).startswith("click is not installed for ")
        assert one_line(run(script, python=python)).startswith(f"No module named 'gluon_mgpu' for {python}: use .venv")


PAGES = {
    "not for this Python": "ImportError: cannot import name 'multiarray'",
    "of which a part is missing": "ModuleNotFoundError: No module named 'numpy._core._multiarray_umath'",
    "for another processor": "RuntimeError: NumPy was built with baseline optimizations",
}


@pytest.mark.parametrize("error", PAGES.values(), ids=PAGES)
def test_of_the_page_that_a_broken_numpy_prints_a_command_says_what_went_wrong(bare, error):
    python, packages = bare
    kind, _, text = error.partition(": ")
    module(
        packages,
        "numpy",
        f"""
        try:
            raise {kind}({text!r})
        except ImportError as error:
            raise ImportError("IMPORTANT: PLEASE READ THIS\\n\\nOriginal error was:\\n" + str(error) + "\\n") from error
        """,
    )
    for program in ([ROOT / "scripts" / "train.py"], ["-m", "gluon_mgpu", "train"]):
        done = run(program, python=python, PYTHONPATH=str(packages))
        assert one_line(done).startswith(f"{error} (") and "--debug shows where" in done.stderr
        shown = run(program, "--debug", python=python, PYTHONPATH=str(packages))
        assert shown.stderr.startswith("Traceback") and shown.stderr.endswith(done.stderr)


@pytest.mark.parametrize(
    "code, says",
    [
        ("raise RuntimeError('built for another machine')", "RuntimeError: built for another machine"),
        (
            "try:\n    import no_such\nexcept ImportError as e:\n    raise ImportError('much\\nadvice') from e",
            "no_such",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended by SIGILL"),
    ],
    ids=["error", "cause", "crash"],
)
def test_a_numpy_that_is_broken_is_named_with_the_cause(bare, code, says):
    python, packages = bare
    module(packages, "numpy", code)
    done = examine(python=python, PYTHONPATH=str(packages))
    assert done.returncode == 1 and says in only(done, "problem")[0] and "pip install" in only(done, "problem")[0]


def test_an_older_numpy_is_noted(tmp_path, monkeypatch):
    module(tmp_path, "numpy", "__version__ = '1.21.6'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._numpy() == ("note", "NumPy 1.21.6: tried from 1.22 on; `pip install --upgrade numpy`")


@pytest.mark.parametrize("version, mark", [((3, 8), "note"), ((3, 9), "ok"), ((3, 13), "ok"), ((3, 14), "note")])
def test_pythons_that_were_not_tried_are_noted(monkeypatch, version, mark):
    monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))
    assert doctor._python()[0] == mark


def wheels(folder, *names):
    """What pip leaves of wheels in one folder: one mxnet, which is the installed one, and the metadata of each."""
    import mxnet

    os.symlink(Path(mxnet.__file__).parent, folder / "mxnet")
    for name in names:
        info = folder / f"{name.replace('-', '_')}-1.9.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.9.1\n")
    return str(folder)


def test_both_wheels_at_once_are_a_problem_and_training_refuses_in_one_line(tmp_path):
    path = wheels(tmp_path, "mxnet", "mxnet-cu112")
    says = "mxnet and mxnet-cu112 are both installed"
    done = examine(PYTHONPATH=path)
    assert done.returncode == 1
    assert len(only(done, "problem")) == 1 and says in only(done, "problem")[0]
    trained = run(["-m", "gluon_mgpu"], "train", *TINY, PYTHONPATH=path)
    assert (trained.returncode, trained.stdout) == (1, "")
    assert trained.stderr.startswith(f"error: {says}") and trained.stderr.count("\n") == 1
    assert "`pip uninstall -y mxnet mxnet-cu112`" in trained.stderr


BLIND = r"""
#include <stdlib.h>
#include <string.h>
unsigned int la_version(unsigned int version) { return version; }
/* The loader asks here before it looks at a path: it is sent astray for the libraries that HIDDEN names. */
char *la_objsearch(const char *path, unsigned long *cookie, unsigned int flag) {
  const char *file = strrchr(path, '/');
  return file && strstr(getenv("HIDDEN"), file + 1) ? "/nonexistent" : (char *)path;
}
"""


@pytest.fixture(scope="module")
def blind_loader(tmp_path_factory):
    """The environment under which the system's loader finds none of some libraries, whoever asks."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    source = tmp_path_factory.mktemp("blind") / "blind.c"
    source.write_text(BLIND)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
    return lambda *libraries: {"LD_AUDIT": str(source.with_suffix(".so")), "HIDDEN": " ".join(libraries)}


@pytest.mark.parametrize(
    "libraries, packages",
    [
        (["libgomp.so.1"], "libgomp1"),
        (["libquadmath.so.0"], "libquadmath0"),
        (["libgomp.so.1", "libquadmath.so.0"], "libgomp1 libquadmath0"),
        (["libstdc++.so.6"], "libstdc++6"),
    ],
    ids=str,
)
def test_libraries_that_the_loader_cannot_find_are_named_all_at_once_with_their_packages(
    blind_loader, libraries, packages
):
    says = f"MXNet needs {' and '.join(libraries)}, which this machine does not have: `apt install {packages}` "
    done = examine(**blind_loader(*libraries))
    assert done.returncode == 1
    assert len(only(done, "problem")) == 1 and says in only(done, "problem")[0]
    for program in (["-m", "gluon_mgpu", "train"], [ROOT / "scripts" / "train.py"]):
        assert one_line(run(program, *TINY, **blind_loader(*libraries))).startswith(says)


def test_the_wheel_for_gpus_without_a_driver_is_a_problem_that_names_the_driver(blind_loader, tmp_path):
    done = examine(PYTHONPATH=wheels(tmp_path, "mxnet-cu112"), **blind_loader("libcuda.so.1"))
    assert done.returncode == 1 and len(only(done, "problem")) == 1
    assert only(done, "problem")[0].startswith("MXNet (mxnet-cu112 1.9.1) cannot be imported: libcuda.so.1 ")


def test_every_library_that_the_wheel_takes_from_the_system_has_its_package_here():
    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    import mxnet

    folder = Path(mxnet.__file__).parent
    needed = set()
    for library in folder.glob("*.so*"):
        listed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed |= {line.split("[")[1].rstrip("]") for line in listed.splitlines() if "(NEEDED)" in line}
    libc = {f"lib{name}" for name in ("c.so.6", "m.so.6", "dl.so.2", "rt.so.1", "pthread.so.0")}
    ours = {path.name for path in folder.iterdir()}
    assert needed - ours - libc - {"ld-linux-x86-64.so.2"} == set(engine.LIBRARIES)


def test_a_library_whose_package_is_not_known_is_named_too():
    message = "libcudnn.so.8: cannot open shared object file: No such file or directory"
    assert engine.missing(message).startswith("libcudnn.so.8 is needed, which this machine does not have: ")


def test_a_module_that_pip_knows_by_another_name_is_asked_for_by_that():
    assert engine.missing("No module named 'distutils'").endswith("or `pip install setuptools`")
    assert engine.missing("No module named 'PIL'").endswith("or `pip install pillow`")


def test_another_message_is_not_taken_for_a_missing_library():
    assert engine.missing("/usr/lib/libgomp.so.1: file too short") is None


def test_an_mxnet_that_crashes_is_a_problem_and_doctor_goes_on(tmp_path):
    module(tmp_path, "mxnet", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    done = examine(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and len(only(done, "problem")) == 1
    assert "cannot be imported: ended by SIGILL" in only(done, "problem")[0]
    assert not any("trial" in line for line in done.stdout.splitlines())


def test_an_mxnet_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    module(
        tmp_path,
        "mxnet",
        f"""
        import os, subprocess, time
        other = subprocess.Popen(["sleep", "300"])
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{other.pid}}")
        time.sleep(300)
        """,
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "SECONDS", 5)
    (mark, says), _, _ = doctor._mxnet(True)
    assert mark == "problem" and "does not end within 5 s" in says
    pids = (tmp_path / "pids").read_text().split()
    within(10, lambda: not any(alive(pid) for pid in pids))


def test_a_main_job_that_fails_in_its_trial_is_a_problem_with_its_own_line():
    done = examine(MXNET_CPU_TEMP_COPY="many")  # MXNet imports, and then cannot compute
    assert done.returncode == 1 and len(only(done, "problem")) == 1
    assert only(done, "problem")[0].startswith("a trial of train --impl scratch --gpus 2 fails: ")
    assert "MXNET_CPU_TEMP_COPY expect int but value='many'" in only(done, "problem")[0]


def test_the_cores_are_those_that_this_process_may_use():
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}}); from gluon_mgpu import doctor; print(doctor._cores())"
    assert run(["-c", code]).stdout.startswith("('ok', '1 core for this process: --gpus 1 ")


@pytest.mark.parametrize(
    "own, files, cores",
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ("0::/the/host's/path\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (
            "3:cpuset:/\n1:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_a_control_groups_quota_is_read_in_both_versions(tmp_path, own, files, cores):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert doctor.cgroup_cores(tmp_path / "own", tmp_path / "mount") == cores


@pytest.mark.parametrize("quota, gpus", [(1.5, 1), (0.5, 1), (3.9, 3)])
def test_a_quota_below_the_cores_decides_how_many_contexts_are_suggested(monkeypatch, quota, gpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(doctor, "cgroup_cores", lambda: quota)
    mark, says = doctor._cores()
    assert mark == "note" and f"{quota} of 8 cores" in says and f"--gpus {gpus} " in says
    assert f"OMP_NUM_THREADS={gpus}" in says


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts a stand-in for nvidia-smi on PATH, from the body of a shell script."""

    def make(body):
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return make


def test_each_gpu_is_named_with_what_mxnet_can_do_with_it(smi):
    smi(
        """[ "$*" = "--format=csv,noheader --query-gpu=name,compute_cap,driver_version" ] || exit 2
        cat <<'END'
        Tesla K80, 3.7, 470.256.02
        Tesla M60, 5.2, 535.183.01
        NVIDIA A100-SXM4-40GB, 8.0, 535.183.01
        NVIDIA GeForce RTX 4090, 8.9, 550.54.14
        NVIDIA H200, 9.0, 570.133.20
        NVIDIA B200, 10.0, 570.133.20
        END""".replace("        ", "")
    )
    found = list(doctor._gpus(cuda=True, seen=6))
    assert [mark for mark, _ in found] == ["note", "ok", "ok", "ok", "note", "note"]
    assert found[2][1] == (
        "GPU NVIDIA A100-SXM4-40GB, compute capability 8.0, driver 535.183.01: MXNet has kernels for it"
    )
    for index, name, capability in ((0, "Tesla K80", "3.7"), (4, "NVIDIA H200", "9.0"), (5, "NVIDIA B200", "10.0")):
        assert f"GPU {name}, compute capability {capability}," in found[index][1]
        assert "kernels for 5.x to 8.x only; train with --device cpu" in found[index][1]


def test_a_gpu_that_this_mxnet_is_not_built_for_is_noted_with_the_wheel_that_is(smi):
    smi("echo 'NVIDIA A100-SXM4-40GB, 8.0, 535.183.01'")
    [(mark, says)] = doctor._gpus(cuda=False, seen=0)
    assert mark == "note" and "mxnet-cu112 has kernels for it" in says and ".[cu112]" in says


def test_gpus_that_mxnet_does_not_see_are_noted(smi, monkeypatch):
    smi("echo 'NVIDIA A100-SXM4-40GB, 8.0, 535.183.01'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    mark, says = list(doctor._gpus(cuda=True, seen=0))[-1]
    assert mark == "note" and "sees no GPU" in says and "CUDA_VISIBLE_DEVICES is ''" in says


OLD = """case "$*" in *compute_cap*) printf 'Field "compute_cap" is not a valid field to query.\\n\\n'; exit 2;; esac
echo 'Tesla V100-SXM2-16GB, {driver}'"""


@pytest.mark.parametrize(
    "driver, says", [("470.182.03", "kernels for 5.x to 8.x"), ("440.33.01", "CUDA 11 needs driver 450.80.02")]
)
def test_an_old_driver_that_tells_no_compute_capability_is_asked_for_the_rest(smi, driver, says):
    smi(OLD.format(driver=driver))
    [(mark, line)] = doctor._gpus(cuda=True, seen=1)
    assert mark == "note" and f"GPU Tesla V100-SXM2-16GB, compute capability not told, driver {driver}: " in line
    assert says in line


FAILURES = [
    (
        9,
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running.",
    ),
    (6, "No devices were found"),
    (18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183"),
    (127, ""),
]


@pytest.mark.parametrize("status, text", FAILURES, ids=[str(status) for status, _ in FAILURES])
def test_what_nvidia_smi_fails_with_is_passed_on_in_one_line(smi, status, text):
    smi(f'cat <<"END"\n{text}\nEND\nexit {status}')
    [(mark, says)] = doctor._gpus(cuda=True, seen=0)
    assert mark == "note" and "\n" not in says and says.endswith("--device cpu trains without GPUs")
    assert (text.splitlines() or [f"exit status {status}"])[0].rstrip(".") in says


def test_a_line_of_nvidia_smi_that_is_no_gpu_is_shown_as_it_is(smi):
    line = "Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error"
    smi(f"echo '{line}'")
    assert list(doctor._gpus(cuda=True, seen=1)) == [("note", f"nvidia-smi says {line!r}")]


def test_a_driver_that_hangs_nvidia_smi_costs_its_time_limit_and_leaves_no_process(smi, tmp_path, monkeypatch):
    smi(f"sleep 300 & echo $$ $! > {tmp_path}/pids; wait")
    monkeypatch.setattr(doctor, "SMI_SECONDS", 2)
    [(mark, says)] = doctor._gpus(cuda=True, seen=0)
    assert mark == "note" and "no answer within 2 s" in says
    pids = (tmp_path / "pids").read_text().split()
    within(10, lambda: not any(alive(pid) for pid in pids))


def test_without_nvidia_smi_there_are_no_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    [(mark, says)] = doctor._gpus(cuda=False, seen=0)
    assert mark == "ok" and "no NVIDIA GPU" in says


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_at_once_with_all_that_it_started(smi, tmp_path, sent):
    smi(f"sleep 300 & echo $$ $! > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pids; wait")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, ROOT / "scripts" / "doctor.py"], **streams)
    within(120, (tmp_path / "pids").exists)
    child.send_signal(sent)
    said, errors = child.communicate(timeout=15)  # nvidia-smi's own limit is longer
    assert (child.returncode, errors.strip()) == (130, "interrupted") and "can run" not in said
    pids = (tmp_path / "pids").read_text().split()
    within(10, lambda: not any(alive(pid) for pid in pids))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty home and the tiny files that stand for both data sets; returns what puts these into a folder."""
    tiny = datasets.synthetic(30, 10)
    arrays = tiny.train_images[:, 0], tiny.train_labels, tiny.test_images[:, 0], tiny.test_labels
    headers = (bytes([0, 0, 8, a.ndim]) + np.array(a.shape, ">u4").tobytes() for a in arrays)
    files = dict(zip(datasets.SHA256["mnist"], (h + a.tobytes() for h, a in zip(headers, arrays))))
    sums = {file: hashlib.sha256(raw).hexdigest() for file, raw in files.items()}
    monkeypatch.setattr(datasets, "SHA256", {"fashion-mnist": sums, "mnist": sums})
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.delenv("GLUON_MGPU_DATA", raising=False)
    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "mxnet"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(folder):
        folder.mkdir(parents=True)
        for file, raw in files.items():
            (folder / f"{file}.gz").write_bytes(gzip.compress(raw))
        return folder

    return put


def test_data_that_is_there_is_verified_and_shown_with_its_folder(data, tmp_path):
    fashion, digits = data(tmp_path / "system" / "fashion-mnist"), data(tmp_path / "cache" / "gluon_mgpu" / "mnist")
    found = list(doctor._data(None))
    assert found[0] == ("ok", f"fashion-mnist is in {fashion}, and its SHA-256 is right")
    assert found[1] == ("ok", f"mnist is in {digits}, and its SHA-256 is right")
    assert found[2][0] == "ok" and str(tmp_path / "cache" / "gluon_mgpu") in found[2][1]


def test_missing_data_is_a_note_since_training_downloads_it(data):
    found = list(doctor._data(None))
    assert [mark for mark, _ in found] == ["note", "note", "ok"]
    assert "it is downloaded" in found[0][1] and "Debian's package dataset-fashion-mnist" in found[0][1]
    assert "it is downloaded" in found[1][1] and "package" not in found[1][1]


@pytest.mark.parametrize("name, mark", [("fashion-mnist", "problem"), ("mnist", "note")])
def test_a_damaged_file_is_named_and_a_problem_where_the_main_job_needs_it(data, tmp_path, name, mark):
    folders = {each: data(tmp_path / "here" / each) for each in ("fashion-mnist", "mnist")}
    path = folders[name] / "t10k-labels-idx1-ubyte.gz"
    raw = bytearray(gzip.decompress(path.read_bytes()))
    raw[-1] ^= 1
    path.write_bytes(gzip.compress(bytes(raw)))
    found = list(doctor._data(str(tmp_path / "here")))
    bad = [(each, says) for each, says in found if each != "ok"]
    assert len(bad) == 1 and bad[0][0] == mark
    assert bad[0][1].startswith(f"{path} is not {name}'s: SHA-256 expected ") and "delete or replace it" in bad[0][1]


def test_a_folder_that_the_user_named_and_that_has_no_data_is_a_problem(data, tmp_path, monkeypatch):
    monkeypatch.setenv("GLUON_MGPU_DATA", str(tmp_path / "empty"))
    found = list(doctor._data(None))
    assert [mark for mark, _ in found] == ["problem", "note", "ok"] and "no fashion-mnist in" in found[0][1]


@pytest.mark.parametrize("there, mark", [(False, "problem"), (True, "note")])
def test_a_cache_that_cannot_be_written_is_a_problem_where_data_must_be_downloaded(data, tmp_path, there, mark):
    if there:
        data(tmp_path / "system" / "fashion-mnist")
    (tmp_path / "cache").write_text("a file in place of a folder")
    found_mark, says = list(doctor._data(None))[-1]
    assert found_mark == mark and "cannot be written (Not a directory): set XDG_CACHE_HOME" in says
    if not there:  # which is what training would say
        with pytest.raises(Error, match="cannot write to .* XDG_CACHE_HOME"):
            datasets.fetch("fashion-mnist")


def test_a_disk_without_room_for_a_data_set_is_said_with_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10 << 20))
    mark, says = doctor._space(tmp_path, "the cache", "make room", "problem")
    assert (mark, says) == ("problem", f"the cache, {tmp_path}, has 0.0 GB free, and a data set needs 0.03: make room")


def horovod(folder, monkeypatch, code):
    module(folder / "horovod", "__init__", "__version__ = '0.28.1'")
    module(folder / "horovod", "mxnet", code)
    monkeypatch.syspath_prepend(str(folder))  # for what looks for it here
    monkeypatch.setenv("PYTHONPATH", str(folder))  # and for what imports it


def test_a_horovod_built_for_this_mxnet_is_shown_with_its_version(tmp_path, monkeypatch):
    horovod(tmp_path, monkeypatch, "import mxnet")
    assert doctor._horovod(True) == ("ok", "Horovod 0.28.1, built for this MXNet")


def test_a_horovod_that_was_built_without_mxnet_is_noted(tmp_path, monkeypatch):
    horovod(tmp_path, monkeypatch, "raise ImportError('Extension horovod.mxnet has not been built')")
    mark, says = doctor._horovod(True)
    assert mark == "note" and "Extension horovod.mxnet has not been built" in says and "make horovod" in says


def test_a_missing_horovod_is_noted_with_the_tools_that_building_it_lacks(bare, tmp_path):
    python, packages = bare
    (tmp_path / "path").mkdir()
    for tools, after in (([], ", after `apt install g++ make`"), (["g++"], ", after `apt install make`")):
        for tool in tools:
            os.symlink(shutil.which("true"), tmp_path / "path" / tool)
        done = examine(python=python, PYTHONPATH=str(packages), PATH=str(tmp_path / "path"))
        assert only(done, "note")[-1].endswith(f"`make horovod`{after}")


def test_marks_are_coloured_on_a_terminal_and_plain_in_a_pipe(bare):
    python, packages = bare
    environment = {**os.environ, "PYTHONPATH": str(packages), "TERM": "xterm"}
    ours, theirs = pty.openpty()
    subprocess.run([python, ROOT / "scripts" / "doctor.py"], env=environment, stdout=theirs, stderr=theirs, timeout=120)
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 4096):
            said += part
    except OSError:  # the other side is closed
        pass
    os.close(ours)
    assert b"\x1b[32mok" in said and b"\x1b[31mproblem" in said
    assert "\x1b" not in examine(python=python, PYTHONPATH=str(packages)).stdout
