"""The environment of old programs is complete or absent, is made by one process, and keeps what the user adds apart.

A stand-in for Python makes environments at once; test_contexts.py uses a real one.
"""

import ast
import builtins
import collections.abc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import runs
from runs import wait, write_program

from gluon_mgpu.old import environment, packages
from gluon_mgpu.support.errors import Error, UsageError

# `python3.8 -c` prints its version. `python3.8 -m venv ... FOLDER` copies this script; so `FOLDER/bin/python -m pip` is
# this script, too. It writes what it is asked to install, and from where, and waits or fails if it is told to.
PYTHON = """
case "$*" in
    *"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin" "$folder/lib/python3.8/site-packages"
        cp "$0" "$folder/bin/python" ;;
    *"-m pip"*) for file; do :; done; echo $* $(cat "$file") "$PIP_FIND_LINKS" >> "$TEST_FOLDER/pip"
        while [ -e "$TEST_FOLDER/wait" ]; do sleep 0.05; done
        if [ -e "$TEST_FOLDER/fail" ]; then echo "ERROR: no such wheel" >&2; exit 1; fi ;;
    *"version_info"*) echo 3.8 ;;
    *) echo "ran $*" ;;
esac
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a stand-in for Python 3.8, an empty cache, and a space in its name."""
    folder = tmp_path / "a folder"
    write_program(folder / "bin" / "python3.8", PYTHON)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for variable in ("PYENV_ROOT", "TEST_FOLDER", "PIP_FIND_LINKS"):
        monkeypatch.setenv(variable, str(folder))
    (folder / "old.py").touch()
    return folder


def start(folder):
    words = [sys.executable, "-m", "gluon_mgpu", "run", "old.py", "x"]
    return subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def installs(folder):
    return (folder / "pip").read_text().splitlines() if (folder / "pip").exists() else []


def test_two_processes_make_it_once_with_what_the_table_says_from_the_users_folder_of_wheels(folder):
    (folder / "wait").touch()
    first = start(folder)
    wait(lambda: installs(folder))
    second = start(folder)
    assert second.stderr.readline()  # it waits for the first one, and says so
    (folder / "wait").unlink()
    for process in (first, second):
        assert process.communicate(timeout=runs.HORIZON)[0] == "ran old.py x\n"
    [pip] = installs(folder)
    assert set(packages.PINS["3.8"].split()) <= set(pip.split()) and pip.endswith(str(folder))
    (folder / "requirements.txt").write_text("mxboard")  # mentioned, but not used
    out, notice = start(folder).communicate(timeout=runs.HORIZON)
    assert out == "ran old.py x\n" and "--requirements requirements.txt" in notice and notice.count("\n") == 1
    assert len(installs(folder)) == 1


ENDS = {"failure": 1, "Ctrl-C": 130, "SIGKILL": -9}


@pytest.mark.parametrize("end", ["failure", *(pytest.param(end, marks=pytest.mark.slow) for end in [*ENDS][1:])])
def test_after_a_failure_it_is_made_anew(folder, end):
    (folder / ("fail" if end == "failure" else "wait")).touch()
    process = start(folder)
    wait(lambda: installs(folder))
    if end != "failure":
        process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    error = process.communicate(timeout=runs.HORIZON)[1].splitlines()[-1]
    assert process.returncode == ENDS[end] and ("no such wheel" in error) == (end == "failure")
    assert end == "SIGKILL" or not list(environment.folder().glob("*"))
    for name in ("fail", "wait"):
        (folder / name).unlink(missing_ok=True)
    assert start(folder).communicate(timeout=runs.HORIZON)[0] == "ran old.py x\n"


def test_other_pins_and_added_packages_have_their_own_and_removal_removes_all(folder, monkeypatch):
    (folder / "list.txt").write_text("mxboard\n")
    added = {"extra": ["gluoncv==0.10.5"]}
    options = ({}, added, {"requirements": str(folder / "list.txt")}, added)
    before, *pythons = (environment.find_or_make(**given) for given in options)
    assert len({before, *pythons}) == 3 and len(installs(folder)) == 3
    assert "numpy==" not in installs(folder)[1]  # what the first environment has is not installed again
    # pip says that a package is in conflict, not that it cannot be found, if limits and requirements both name it
    assert ["--constraint" in words for words in installs(folder)] == [False, True, True]
    monkeypatch.setitem(packages.PINS, "3.8", "numpy==1.19.4 pandas==1.1.5")
    assert environment.find_or_make() != before
    os.unlink(before)  # as if the Python that it links to had been removed
    (environment.folder() / "python.txt").touch()  # not an environment
    assert [" MB: " in line for line in environment.described()] == [True] * 4
    assert runs.gluon_mgpu("run", "--environment", "show").stdout.count("\n") == 4
    assert runs.gluon_mgpu("run", "--environment", "remove", "--with", "x").returncode == 2
    assert runs.gluon_mgpu("run", "--environment", "remove").stdout == "no environments\n"


REQUIREMENTS = """
# of 2019
mxnet-cu92==1.5.0 ; python_version > "3"
MXNet_MKL>=1.4
-r more/others.txt
Pillow == 6.0  \\
    --hash=sha256:00
pyyaml
mxnet-model-server==1.0  # another package
git+https://example.org/numpy.git#egg=x
--index-url https://example.org
"""


def test_of_a_requirements_file_what_the_environment_has_is_kept_and_said_and_the_rest_is_installed(folder, capsys):
    (folder / "more").mkdir()
    (folder / "list.txt").write_text(REQUIREMENTS)
    (folder / "more/others.txt").write_text("numpy==1.16.4\n-r ../list.txt\n-c limits.txt\nmxboard", "utf-16")
    (folder / "more/limits.txt").write_text("numpy==1.15\nsix==1.16")
    environment.find_or_make(requirements=str(folder / "list.txt"))
    wanted = "mxboard mxnet-model-server==1.0 git+https://example.org/numpy.git#egg=x --index-url https://example.org"
    assert f"requirements.txt {wanted} " in installs(folder)[-1]
    said = next(line for line in capsys.readouterr().err.splitlines() if "versions" in line)
    assert all(name in said for name in ("numpy==1.16.4 (1.19.5)", "mxnet-cu92==1.5.0 (1.9.1)", "Pillow == 6.0"))
    assert "pyyaml" not in said and len(installs(folder)) == 2
    [added] = [path for path in environment.folder().iterdir() if path.name.count("-") == 2]
    assert {"six==1.16", "numpy<1.24"} <= set((added / "limits.txt").read_text().split())
    assert "mxboard mxnet-model-server" in "".join(environment.described())
    (folder / "only.txt").write_text("numpy==1.16.4\n--no-binary x")
    assert environment.find_or_make(requirements=str(folder / "only.txt")) == environment.find_or_make()


@pytest.mark.parametrize("extra", ["-h", "", " ", "--upgrade", "mxnet==1.5.0", "mxnet-cu92", "MXNet_mkl==1.6"])
def test_options_of_pip_and_another_mxnet_are_not_added(folder, extra):
    with pytest.raises(UsageError):
        environment.find_or_make(extra=[extra])
    assert not environment.folder().exists()


def test_a_package_that_brings_another_mxnet_is_refused(folder):
    brings = 'mkdir -p "$(dirname "$0")/../lib/python3.8/site-packages/mxnet"'
    write_program(folder / "bin/python3.8", PYTHON.replace("*) for file;", f"*) {brings}; for file;"))
    with pytest.raises(Error, match="MXNet"):
        environment.find_or_make(extra=["sockeye"])
    assert len([*environment.folder().iterdir()]) == 1


def test_commands_of_the_environment_have_the_packages_that_are_added(folder):
    base = environment.find_or_make()
    write_program(base.with_name("pip"), f'exec "{base}" -m pip "$@"')
    added = environment.find_or_make(extra=["mxboard"])
    assert str(added) in added.with_name("pip").read_text() and os.access(added.with_name("pip"), os.X_OK)


def test_a_cache_that_was_moved_is_made_anew_because_scripts_contain_its_path(folder, monkeypatch):
    before = environment.find_or_make()
    os.rename(folder / "cache", folder / "moved")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "moved"))
    assert "not used" in environment.described()[0]
    environment.find_or_make()
    assert len(installs(folder)) == 2
    (folder / "link").symlink_to(folder / "moved")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "link"))
    assert environment.find_or_make() != before and len(installs(folder)) == 2  # the same folder


CONFLICT = """
The conflict is caused by:
    The user requested numpy==1.26.4
    The user requested (constraint) numpy<1.24

To fix this you could try to:
"""
FAILURES = [  # (what pip 24.3.1 writes to standard output, and to standard error; what the reason names, and what not)
    (CONFLICT, "ERROR: Cannot install\nERROR: ResolutionImpossible: for help", "numpy<1.24", "space"),
    ("Collecting six\nCollecting numpy==1.16.4\n", "error: x\n\nhint: See above for details.", "numpy==1.16.4", "hint"),
    ("Collecting a\n", "ERROR: Failed to build installable wheels (sk-learn)", "sk-learn", "index"),
    ("", "ERROR: No matching distribution found for x", "found for x", "index"),
    ("", "WARNING: Retrying after connection broken by 'x'\nERROR: No matching distribution found", "index", "space"),
    ("", "ERROR: Could not install: [Errno 28] No space left on device", "XDG_CACHE_HOME", "index"),
]


@pytest.mark.parametrize("out, err, names, omits", FAILURES)
def test_the_reason_why_pip_failed_names_the_package_and_only_what_helps(out, err, names, omits):
    reason = environment._reason(out, err)
    assert names in reason and omits not in reason and "\n" not in reason


def test_without_a_python_or_a_writable_cache_the_error_says_what_to_do(folder):
    def fails_with(words):
        with pytest.raises(Error, match=words):
            environment.find_or_make("3.8")

    (folder / "bin/python3.8").unlink()
    fails_with("uv")
    write_program(folder / "bin/uv", "echo 'error: no connection' >&2; exit 2")
    fails_with("no connection")
    write_program(folder / "bin/python3.8", PYTHON)
    (folder / "cache").write_text("a file")
    fails_with("XDG_CACHE_HOME")


IMPORTED = """
import sys
from gluon_mgpu.data import datasets
from gluon_mgpu.old import differences, notebook, prepare
print(*(module.__file__ for name, module in sys.modules.items() if name.startswith("gluon_mgpu")), sep="\\n")
"""
TYPES = {*dir(builtins), *collections.abc.__all__, "deque"}


def test_modules_of_an_old_programs_process_evaluate_no_type_with_arguments_which_python_3_8_cannot():
    for path in runs.output(IMPORTED).splitlines():
        tree = ast.parse(Path(path).read_text(), feature_version=(3, 8))
        tree.body = [statement for statement in tree.body if ast.unparse(statement)[:16] != "if TYPE_CHECKING"]
        nodes = [*ast.walk(tree)]
        annotations = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
        not_evaluated = {part for annotation in filter(None, annotations) for part in ast.walk(annotation)}
        for node in {*nodes} - not_evaluated:
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                assert node.value.id not in TYPES, f"{path}:{node.lineno}"


def test_beside_cuda_it_has_cuda_unless_the_user_says_cpu(monkeypatch):
    monkeypatch.setattr(packages.cuda, "wheels", lambda: {"mxnet-cu112": "1.9.1"})
    assert {"mxnet-cu112==1.9.1", "nvidia-cudnn-cu11<9"} <= {*packages.required("3.8", cpu=False)}
    assert not any("cu11" in name for name in packages.required("3.8", cpu=True))
