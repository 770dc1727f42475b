"""mxnet-cu112 with NVIDIA's wheels in an environment of its own, on a machine without a GPU: `make test-cuda`.

Only the driver is a stand-in, compiled here. Downloads 2.1 GB and needs 6 GB for temporary files.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gluon_mgpu.runtime import cuda

pytestmark = pytest.mark.cuda_wheels

# The driver of a machine without GPUs: it has a version, and answers CUDA_ERROR_NO_DEVICE to everything else that
# libmxnet.so and libcudart.so.11.0 call.
DRIVER = """
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


def library(folder, name, source):
    """Compile a shared library with this name."""
    folder.mkdir(exist_ok=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / name), f"-Wl,-soname,{name}"]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.fixture(scope="module")
def installed(wheel):
    """The environment: its folder, and run(*command, libraries=the folders that the loader searches first)."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, env=clean)
        pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        subprocess.run([*pip, f"{wheel}[cu112]"], check=True, env=clean)
        library(folder / "driver", "libcuda.so.1", DRIVER)

        def run(*command, libraries=("driver",)):
            environment = {**clean, "LD_LIBRARY_PATH": ":".join(str(folder / name) for name in libraries)}
            streams = {"capture_output": True, "text": True, "cwd": folder, "timeout": 600}
            return subprocess.run([folder / "venv/bin" / command[0], *command[1:]], env=environment, **streams)

        yield SimpleNamespace(folder=folder, run=run)


TRAIN = ("gluon-mgpu", "train", "--dataset", "synthetic", "--gpus", "2", "--limit", "512", "--epochs", "1")


def test_mxnet_imports_with_cuda_and_nccl_and_counts_no_gpu(installed):
    code = """
import gluon_mgpu; gluon_mgpu.configure(2)
import ctypes, mxnet as mx
print([mx.runtime.Features().is_enabled(name) for name in ("CUDA", "CUDNN", "NCCL")], mx.context.num_gpus())
print(ctypes.CDLL("libcudart.so.11.0").cudaGetDeviceCount(ctypes.byref(ctypes.c_int())))
"""
    done = installed.run("python", "-c", code)
    assert done.stdout == "[True, True, True] 0\n100\n", done.stderr  # cudaErrorNoDevice is 100


@pytest.mark.parametrize("impl", ["scratch", "highlevel"])
def test_it_trains_on_cpu_contexts_and_refuses_a_gpu_in_one_line(installed, impl):
    done = installed.run(*TRAIN, "--impl", impl)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1) and "no GPU" in done.stderr, done.stderr
    assert done.stdout.startswith("running on: [cpu(0), cpu(1)]\nepoch 1, time: ")
    done = installed.run(*TRAIN, "--device", "gpu")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "no GPU" in done.stderr


def test_other_cuda_libraries_that_the_loader_would_find_first_are_not_used(installed):
    for _, *names in cuda.LIBRARIES:
        for name in names:
            library(installed.folder / "others", name, "")
    code = """
import gluon_mgpu; gluon_mgpu.configure(2)
import ctypes, mxnet
cudnn = ctypes.CDLL("libcudnn.so.8")
print(cudnn.cudnnGetVersion())
cudnn.cudnnCreate(ctypes.byref(ctypes.c_void_p()))  # with other parts than the wheel's, this ends the process
print(len({line.split()[-1] for line in open("/proc/self/maps") if "/others/" in line}))
"""
    done = installed.run("python", "-c", code, libraries=("driver", "others"))
    assert done.stdout == "8906\n0\n", done.stderr
