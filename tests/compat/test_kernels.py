"""Kernels for newer GPUs. No GPU is needed: fake_cuda.c stands in for NVIDIA's libraries.

`make test-cuda` runs the lessons with the wheel mxnet-cu112.
"""

import os
import subprocess
import sys

import fake_cuda
import pytest
from runs import call, finished

from gluon_mgpu.commands.main import main
from gluon_mgpu.compat import cuda
from gluon_mgpu.compat.kernels import build, sources
from gluon_mgpu.support.errors import Error

NAMES = build.NAMES.read_text().split()

# Stands in for libmxnet.so: registers three kernels as nvcc's code does, and launches each.
PROGRAM = """
#include <stdio.h>
typedef struct { unsigned x, y, z; } Dim;
void **__cudaRegisterFatBinary(void *); void __cudaRegisterFatBinaryEnd(void **); int cudaGetLastError(void);
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
int cudaLaunchKernel(const void *, Dim, Dim, void **, unsigned long, void *);
static char first, second, third;
int run(void) {
  Dim one = {1, 1, 1};
  void **binary = __cudaRegisterFatBinary(&one);
  __cudaRegisterFunction(binary, &first, "first", "first", -1, 0, 0, 0, 0, 0);
  __cudaRegisterFunction(binary, &second, "_Z6secondPf", "_Z6secondPf", -1, 0, 0, 0, 0, 0);
  __cudaRegisterFunction(binary, &third, "third", "third", -1, 0, 0, 0, 0, 0);
  __cudaRegisterFatBinaryEnd(binary);
  for (int i = 0; i < 2; i++) {
    printf("%d ", cudaLaunchKernel(&first, one, one, 0, 0, 0));
    printf("%d ", cudaLaunchKernel(&second, one, one, 0, 0, 0));
    printf("%d ", cudaLaunchKernel(&third, one, one, 0, 0, 0));
    printf("%d ", cudaGetLastError());
    printf("%d\\n", cudaGetLastError());
  }
  fflush(stdout);
}
"""


def test_kernels_are_launched_from_the_built_library_and_a_missing_one_is_one_line_with_the_command(tmp_path):
    tmp_path /= 'folder "é"'
    (tmp_path / "fakes").mkdir(parents=True)
    program = tmp_path / "program.so"
    gcc = ["gcc", "-shared", "-fPIC", "-w", "-o", program, "-x", "c", "-"]
    subprocess.run(gcc, input=PROGRAM, text=True, check=True)
    fake_cuda.build(program, tmp_path / "fakes")
    for module in ("a", "b"):
        (tmp_path / f"{module}.fatbin").write_bytes(b"compiled")
    library = tmp_path / "sm_90.so"
    build.link({"a": ["first"], "b": ["third"]}, library, "run this command")
    code = f"""
import ctypes
for library in ({str(library)!r}, "libcudart.so.11.0"):
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
ctypes.CDLL({str(program)!r}).run()
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "fakes")}
    done = finished(sys.executable, "-c", code, env=environment)
    assert done.stdout == "0 209 0 209 0\n" * 2, done.stderr  # 209: cudaErrorNoKernelImageForDevice
    [line] = done.stderr.splitlines()
    assert " second(float*)" in line and "run this command" in line
    assert (tmp_path / build.MISSING).read_text() == "_Z6secondPf\n"


@pytest.fixture
def source(tmp_path):
    """A folder that looks like MXNet's sources, with empty files."""
    folder = tmp_path / "mxnet"
    for path in build.INCLUDE:
        (folder / path).mkdir(parents=True, exist_ok=True)
    for group in sources.GROUPS.sections():
        for path in sources.GROUPS[group]["headers"].split():
            (folder / "src" / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / "src" / path).write_text("namespace mxnet {\nnamespace op {\nNNVM_REGISTER_OP(x)\n}\n}\n")
    (folder / "include/mxnet").mkdir()
    version = "".join(f"#define MXNET_{part} {n}\n" for part, n in (("MAJOR", 1), ("MINOR", 9), ("PATCH", 1)))
    (folder / "include/mxnet/base.h").write_text(version)
    return folder


def test_every_kernel_is_instantiated_once_and_operators_are_left_out(source, tmp_path):
    groups, unknown = sources.write([*NAMES, "_Z5otherPf"], source, tmp_path)
    assert unknown == ["other(float*)"]
    assert sorted(name for names in groups.values() for name in names) == sorted(NAMES)
    for group, names in groups.items():
        text = (tmp_path / f"{group}.cu").read_text()
        assert text.count("template __global__ void ") >= len(names) - 2  # a few are no templates
        assert "NNVM_REGISTER_OP" not in text


PTX = """
.visible .entry {0}(
)
{{
ret;
}}
// .globl other
.visible .entry other(
)
{{
ret;
}}
"""


def test_other_kernels_are_removed_and_marks_of_anonymous_namespaces_become_those_of_the_wheel():
    name = "_Z6kernelN{}_GLOBAL__N__{}3abcE"
    ours, wheels = name.format(22, "file_12345"), name.format(18, "x_1234")
    assert build._without_mark(ours) == build._without_mark(wheels) == "_Z6kernelN3abcE"
    text = build.only([wheels], PTX.format(ours))
    assert f".entry {wheels}(" in text and ours not in text and "other" not in text.replace(".globl other", "")
    with pytest.raises(Error, match="missing"):
        build.only(["_Z7missingPf"], PTX.format(ours))


def without(source, path):
    (source / path).rmdir()
    return source


def unwritable(source):
    (source.parent / "kernels").touch()
    return source


@pytest.mark.parametrize(
    "folder, options, status, word",
    [
        (lambda source: source.parent, [], 2, "git clone"),
        (lambda source: without(source, "3rdparty/dlpack/include"), [], 2, "3rdparty/dlpack/include"),
        (lambda source: source, ["--arch", "hopper"], 2, "--arch hopper"),
        (lambda source: source, ["--nvcc", "no-nvcc"], 1, "no-nvcc"),
        (lambda source: source, ["--nvcc", "false"], 1, "false"),
        (lambda source: source, ["--nvcc", "true"], 1, "true"),
        (unwritable, [], 1, "kernels"),
    ],
)
def test_what_cannot_be_compiled_is_one_line(source, monkeypatch, capsys, folder, options, status, word):
    monkeypatch.setattr(cuda, "kernels_folder", lambda: source.parent / "kernels")
    found, out, err = call(capsys, main, "compile", folder(source), *options)
    *notices, line = err.splitlines()
    assert (found, out) == (status, "") and line.startswith("error: ") and word in line
    assert all(notice.startswith("gluon_mgpu: ") for notice in notices)


def test_a_library_that_works_stays_until_another_one_is_complete(source, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "kernels_folder", lambda: tmp_path)
    monkeypatch.setattr(build, "NAMES", tmp_path / "no names")
    build.NAMES.touch()
    (tmp_path / "sm_90.so").write_text("works")
    monkeypatch.setattr(build, "link", lambda groups, library, advice: library.write_text("half") and [][0])
    with pytest.raises(IndexError):
        build.build(source, "sm_90")
    assert (tmp_path / "sm_90.so").read_text() == "works"
    monkeypatch.setattr(build, "link", lambda groups, library, advice: library.write_text("new"))
    assert build.build(source, "compute_80").read_text() == "new" and len([*tmp_path.glob("*.so")]) == 1


@pytest.mark.parametrize(
    "library, capability, has",
    [
        (None, (8, 6), True),
        (None, (9, 0), False),
        ("sm_90.so", (9, 0), True),
        ("sm_90.so", (10, 0), False),
        ("sm_100.so", (9, 0), False),
        ("compute_80.so", (12, 0), True),
        ("compute_80.so", (3, 7), False),
    ],
)
def test_a_gpu_has_kernels_if_the_wheel_or_the_built_library_does(monkeypatch, tmp_path, library, capability, has):
    monkeypatch.setattr(cuda, "kernels_folder", lambda: tmp_path)
    if library:
        (tmp_path / library).touch()
    assert cuda.has_kernels(*capability) is has
