"""mxnet-cu112 and NVIDIA's wheels: with stand-ins for both, and, in `make test-cuda`, installed (2.1 GB to download).

Only the driver is always a stand-in. Checks run in separate processes.
"""

import configparser
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import fake_cuda
import pytest
from runs import ROOT, finished, python

from gluon_mgpu.compat import cuda
from gluon_mgpu.compat.kernels import build

LIBM = next(line.split()[-1] for line in open("/proc/self/maps") if re.search(r"/libm[.-][^/]*so", line))
ALL = [library for _, *libraries in cuda.LIBRARIES for library in libraries]
DRIVER = "libm.so.6"  # stands in for libcuda.so.1


class Site:
    """A site-packages folder. Its libraries are links to a library that the loader can open."""

    def __init__(self, folder):
        self.folder = folder
        self.later = []  # folders that come after it on the path

    def install(self, wheel, *files):
        info = self.folder / f"{wheel.replace('-', '_')}-1.9.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 1.9.1\n")
        (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        for file in files:
            path = self.folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".py":
                path.touch()
            else:
                path.symlink_to(LIBM)

    def install_nvidia(self, without=()):
        for wheel, *libraries in cuda.LIBRARIES:
            name = wheel.partition("<")[0]
            if name not in without:
                self.install(name, *(f"nvidia/{name.split('-')[1]}/lib/{library}" for library in libraries))

    def python(self, code, driver=DRIVER, **environment):
        start = f"from gluon_mgpu.compat import cuda; cuda.DRIVER = {driver!r}\n"
        path = os.pathsep.join(map(str, [self.folder, *self.later]))
        return python(start + textwrap.dedent(code), PYTHONPATH=path, **environment)

    def opened(self, before="", after=""):
        """The libraries that `open_libraries` opens, in order. before, after: more code."""
        done = self.python(f"""
            opened, open_library = [], cuda._open
            cuda._open = lambda library: (open_library(library), opened.append(library))
            {before}
            cuda.open_libraries()
            print(*opened, sep="\\n", end="")
            {after}
        """)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def error(self, **options):
        """The message of the Error that `open_libraries` raises."""
        last = self.python("cuda.open_libraries()", **options).stderr.splitlines()[-1]
        return last.removeprefix("gluon_mgpu.support.errors.Error: ")


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path / "site packages")
    made.install("mxnet-cu112", "mxnet/__init__.py")
    return made


def test_every_library_is_opened_from_its_wheel_after_the_libraries_that_it_needs(site, tmp_path):
    site.install_nvidia()
    site.later = [tmp_path / "later"]
    Site(*site.later).install_nvidia()
    driver, *paths = site.opened()
    assert driver == DRIVER and all(path.startswith(f"{site.folder}/nvidia/") for path in paths)
    at = {Path(path).name: i for i, path in enumerate(paths)}
    assert set(at) == set(ALL)
    for library, *needs in (  # from `readelf -d` and `strings` of the libraries in the wheels
        ("libcublas.so.11", "libcublasLt.so.11"),
        ("libcusolver.so.11", "libcublas.so.11", "libcublasLt.so.11"),
        ("libcudnn_ops_infer.so.8", "libcublas.so.11", "libcublasLt.so.11", "libnvrtc.so.11.2"),
        ("libcudnn_ops_train.so.8", "libcudnn_ops_infer.so.8"),
        ("libcudnn_cnn_infer.so.8", "libcudnn_ops_infer.so.8"),
        ("libcudnn_cnn_train.so.8", "libcudnn_ops_train.so.8", "libcudnn_cnn_infer.so.8"),
        ("libcudnn_adv_infer.so.8", "libcudnn_ops_infer.so.8"),
        ("libcudnn_adv_train.so.8", "libcudnn_ops_train.so.8", "libcudnn_adv_infer.so.8"),
    ):
        assert max(at[need] for need in needs) < at[library], library


@pytest.mark.parametrize("major, needed", [(9, True), (8, False)])
def test_built_kernels_are_opened_first_and_nothing_is_fused_if_a_gpu_needs_them(site, tmp_path, major, needed):
    site.install_nvidia()
    kernels = tmp_path / "kernels/sm_90.so"
    kernels.parent.mkdir()
    kernels.symlink_to(LIBM)
    before = f"cuda.built_kernels = lambda: cuda.Path({str(kernels)!r}); cuda.driver_gpus = lambda: [('', {major}, 0)]"
    after = "print('', cuda.os.environ.get('MXNET_USE_FUSION'), sep='\\n', end='')"
    first, second, *_, fusion = site.opened(before, after)
    assert ((first, second, fusion) == (str(kernels), DRIVER, "0")) is needed
    assert (first == DRIVER and fusion == "None") is not needed


def test_nothing_is_opened_for_another_mxnet_than_the_one_that_is_imported(tmp_path):
    site = Site(tmp_path / "site")
    site.install("mxnet", "mxnet/__init__.py")
    site.install("mxnet-model-server")
    site.install_nvidia()
    assert site.opened() == []
    (tmp_path / "first" / "mxnet_cu112-1.9.1.dist-info").mkdir(parents=True)
    done = site.python(f"import sys; sys.path.insert(0, {str(tmp_path / 'first')!r}); print(cuda.wheels())")
    assert done.stdout == "{'mxnet': '1.9.1'}\n", done.stderr


def test_missing_and_damaged_libraries_are_one_line_with_the_command_that_installs_their_wheels(site):
    site.install_nvidia(without=["nvidia-cufft-cu11", "nvidia-cudnn-cu11"])
    site.install("nvidia-cudnn-cu11", "nvidia/cudnn/lib/libcudnn.so.9")  # a version that is too new
    line = site.error()
    assert re.findall(r"lib\w+\.so[.\d]*", line) == [name for name in ALL if "cudnn" in name or "cufft" in name]
    assert line.endswith("`pip install --force-reinstall --no-deps 'nvidia-cufft-cu11' 'nvidia-cudnn-cu11<9'`")
    for library in ALL:  # the system's libraries are used if no wheel contains them
        (site.folder / library).symlink_to(LIBM)
    assert site.python("cuda.open_libraries()", LD_LIBRARY_PATH=str(site.folder)).returncode == 0
    [path] = site.folder.glob("nvidia/*/lib/libcurand.so.10")
    path.unlink()
    path.write_bytes(b"\x7fELF")
    assert path.name in site.error() and "nvidia-curand-cu11" in site.error()


def test_a_missing_driver_and_two_wheels_of_mxnet_are_errors(site):
    site.install_nvidia()
    assert "libcuda-missing.so.1" in site.error(driver="libcuda-missing.so.1")
    site.install("mxnet-mkl")
    assert "pip uninstall -y" in site.error()


def test_the_extra_installs_mxnet_cu112_and_the_wheels_of_all_libraries():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    names = {line.split()[0] for line in setup["options.extras_require"]["cu112"].splitlines() if line}
    assert names == {"mxnet-cu112", *(wheel.partition("<")[0] for wheel, *_ in cuda.LIBRARIES)}


# The driver of a machine without GPUs: it has a version, and answers CUDA_ERROR_NO_DEVICE to everything else that
# libmxnet.so and libcudart.so.11.0 call.
DRIVER_SOURCE = """
#include <string.h>
#define NO_DEVICE(name) int name(void) { return 100; }
NO_DEVICE(cuInit) NO_DEVICE(cuDeviceGet) NO_DEVICE(cuDevicePrimaryCtxRetain) NO_DEVICE(cuGetErrorString)
NO_DEVICE(cuGraphKernelNodeGetParams) NO_DEVICE(cuGraphNodeGetType) NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuModuleGetFunction) NO_DEVICE(cuModuleLoadData) NO_DEVICE(cuModuleLoadDataEx) NO_DEVICE(cuModuleUnload)
int cuDriverGetVersion(int *version) { *version = 11080; return 0; }
int cuGetProcAddress(const char *name, void **function, int version, unsigned long flags) {
    *function = !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress
              : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion : (void *)cuInit;
    return 0;
}
"""


@pytest.fixture(scope="module")
def installed(wheel):
    """run(*command) in an environment with the wheels and a driver."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, env=clean)
        pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        subprocess.run([*pip, f"{wheel}[cu112]"], check=True, env=clean)
        (folder / "driver").mkdir()
        cc = "cc -shared -fPIC -x c - -o driver/libcuda.so.1 -Wl,-soname,libcuda.so.1"
        subprocess.run(cc.split(), input=DRIVER_SOURCE, text=True, check=True, cwd=folder)

        def run(*command, **changes):
            environment = {**clean, "LD_LIBRARY_PATH": str(folder / "driver"), **changes}
            return finished(folder / "venv/bin" / command[0], *command[1:], env=environment, cwd=folder, timeout=600)

        run.folder = folder
        yield run


TRAIN = "gluon-mgpu train --dataset synthetic --gpus 2 --limit 512 --epochs 1 --seed 1".split()


@pytest.mark.cuda_wheels
def test_mxnet_imports_with_cuda_and_nccl_and_counts_no_gpu(installed):
    code = """
import gluon_mgpu; gluon_mgpu.configure(2)
import ctypes, mxnet as mx
print([mx.runtime.Features().is_enabled(name) for name in ("CUDA", "CUDNN", "NCCL")], mx.context.num_gpus())
print(ctypes.CDLL("libcudart.so.11.0").cudaGetDeviceCount(ctypes.byref(ctypes.c_int())))
"""
    done = installed("python", "-c", code)
    assert done.stdout == "[True, True, True] 0\n100\n", done.stderr  # cudaErrorNoDevice is 100


@pytest.mark.parametrize("impl", ["scratch", "highlevel"])
@pytest.mark.cuda_wheels
def test_it_trains_on_cpu_contexts_and_refuses_a_gpu_in_one_line(installed, impl):
    done = installed(*TRAIN, "--impl", impl)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1) and "no GPU" in done.stderr, done.stderr
    assert done.stdout.startswith("running on: [cpu(0), cpu(1)]\nepoch 1, time: ")
    done = installed(*TRAIN, "--device", "gpu")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "no GPU" in done.stderr


@pytest.fixture(scope="module")
def with_kernels(installed):
    """run(*command): as `installed`, on two H100 that do nothing, with a library that knows the names of kernels."""
    folder = installed.folder
    links = folder / "site/nvidia/fake/lib"
    links.mkdir(parents=True)
    (folder / "site/nvidia/__init__.py").touch()  # as in NVIDIA's wheels, which this package comes before
    [libmxnet] = folder.glob("venv/lib/*/site-packages/mxnet/libmxnet.so")
    fake_cuda.build(libmxnet, links)
    kernels = folder / "cache/gluon_mgpu/kernels"
    kernels.mkdir(parents=True)
    (kernels / "all.fatbin").touch()
    build.link({"all": build.NAMES.read_text().split()}, kernels / "sm_90.so", "run compile")

    def run(*command):
        paths = {"PYTHONPATH": "site", "LD_LIBRARY_PATH": "site/nvidia/fake/lib", "XDG_CACHE_HOME": "cache"}
        done = installed(*command, FAKE_GPUS="2", **{name: str(folder / path) for name, path in paths.items()})
        missing = kernels / build.MISSING
        return done, missing.read_text() if missing.exists() else ""

    return run


LESSONS = ["scratch", "highlevel --momentum 0.9", "highlevel --model resnet18 --no-hybridize"]


@pytest.mark.parametrize("options", LESSONS)
@pytest.mark.cuda_wheels
def test_the_lessons_launch_only_kernels_that_are_compiled(with_kernels, options):
    done, missing = with_kernels(*TRAIN, "--device", "gpu", "--impl", *options.split())
    assert (done.returncode, missing) == (0, ""), done.stderr
    assert done.stdout.startswith("running on: [gpu(0), gpu(1)]\n")


SORTING = """
import gluon_mgpu; gluon_mgpu.configure(1)
import mxnet as mx
from mxnet import autograd, nd
for shape in (20, 30), (1000, 1000):
    x = nd.ones(shape, ctx=mx.gpu())
    nd.sort(x); nd.argsort(x); nd.topk(x, k=3); nd.random.shuffle(x)
    nd.gather_nd(x, nd.array([[1, 2]], mx.gpu(), "int32")); nd.contrib.boolean_mask(x, nd.ones(shape[0], mx.gpu()))
    x.attach_grad()
    with autograd.record():
        y = nd.take(x, nd.arange(5, ctx=mx.gpu())) + nd.Embedding(nd.arange(5, ctx=mx.gpu()), x, *shape)
    y.backward()
nd.waitall()
"""


@pytest.mark.cuda_wheels
def test_sorting_and_the_gradient_of_take_launch_only_kernels_that_are_compiled(with_kernels):
    done, missing = with_kernels("python", "-c", SORTING)
    assert (done.returncode, missing) == (0, ""), done.stderr
    done, missing = with_kernels("python", "-c", SORTING + "print(nd.arcsinh(x).asnumpy())")
    assert done.returncode == 1 and "arcsinh" in missing and "run compile" in done.stderr
