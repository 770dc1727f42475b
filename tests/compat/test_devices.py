import ctypes
import os

import mxnet as mx
import pytest
from runs import refuses

from gluon_mgpu.compat import cuda, devices
from gluon_mgpu.support.errors import Error, UsageError


@pytest.mark.parametrize(
    "given, indices",
    [("2", [0, 1]), ("1", [0]), (3, [0, 1, 2]), ("0,2", [0, 2]), ([2, 1], [2, 1]), ("3,", [3]), (" 1, 0 ", [1, 0])],
)
def test_gpus_is_a_number_of_devices_or_a_list_of_indices(given, indices):
    assert devices.parse(given) == indices


@pytest.mark.parametrize(
    "given", ["0", "-1", "0,-2", "1000000000000", "0,99999999999", "1,0,1", "two", "", "1.5", "0,,1", [0, 0], [-1], 0]
)
def test_anything_else_is_a_usage_error_with_the_value(given):
    assert refuses("gpus", devices.parse, given).value == given


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_a_device_that_is_not_there_is_a_usage_error(device):
    assert refuses("device", devices.contexts, 1, device).value == device


def test_auto_takes_cpu_contexts_if_there_is_no_gpu_and_training_says_so_in_one_line(capsys):
    ctx = devices.contexts("0,2")
    assert ctx == [mx.cpu(0), mx.cpu(2)] and devices.contexts(1, "cpu") == [mx.cpu(0)]
    devices.say_if_no_gpu(ctx, "cpu")
    assert capsys.readouterr() == ("", "")
    devices.say_if_no_gpu(ctx, "auto")
    assert capsys.readouterr().err.count("\n") == 1


def give_gpus(monkeypatch, *gpus):
    """Give this machine GPUs: (name, major, minor)."""
    monkeypatch.setattr(mx.context, "num_gpus", lambda: len(gpus))
    monkeypatch.setattr(devices.cuda, "driver_gpus", lambda: gpus)
    monkeypatch.delenv("MXNET_ENABLE_GPU_P2P", raising=False)


def test_auto_takes_the_gpus_that_mxnet_has_kernels_for(monkeypatch, capsys):
    give_gpus(monkeypatch, ("GeForce GTX 1080", 6, 1), ("A100", 8, 0), ("RTX 4090", 8, 9))
    assert devices.contexts(2) == [mx.gpu(0), mx.gpu(1)]
    assert devices.contexts("0,2", "gpu") == [mx.gpu(0), mx.gpu(2)]
    assert devices.contexts(2, "cpu") == [mx.cpu(0), mx.cpu(1)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("asked", [3, "0,5", "2,5"])
def test_if_there_are_too_few_gpus_auto_takes_cpu_contexts_and_says_so_in_one_line(monkeypatch, capsys, asked):
    give_gpus(monkeypatch, ("A100", 8, 0), ("A100", 8, 0))
    with pytest.raises(UsageError):
        devices.contexts(asked, "gpu")
    ctx = devices.contexts(asked)
    assert ctx == [mx.cpu(i) for i in devices.parse(asked)]
    devices.say_if_no_gpu(ctx, "auto")
    (notice,) = capsys.readouterr().err.splitlines()
    assert "gpus=2" in notice


@pytest.mark.parametrize("pairs, setting", [([], "0"), ([(1, 0)], None)])
def test_mxnet_does_not_try_direct_access_between_gpus_that_have_none(monkeypatch, pairs, setting):
    give_gpus(monkeypatch, ("A100", 8, 0), ("A100", 8, 0))
    driver = Driver(0)
    driver.cuDeviceCanAccessPeer = lambda can, one, other: setattr(can._obj, "value", (one, other) in pairs) or 0
    library = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver if "cuda" in name else library(name))
    devices.contexts("0,")
    assert "MXNET_ENABLE_GPU_P2P" not in os.environ
    devices.contexts(2)
    assert os.environ.pop("MXNET_ENABLE_GPU_P2P", None) == setting


def test_trying_a_gpu_finds_a_wrong_result(monkeypatch):
    monkeypatch.setattr(devices, "contexts", lambda *_: [mx.cpu(0)])  # a CPU stands in
    devices.try_gpu(0)
    monkeypatch.setattr(mx.nd, "dot", lambda a, b: a + b)
    with pytest.raises(Error):
        devices.try_gpu(0)


@pytest.mark.parametrize("name, major, minor", [("NVIDIA H200", 9, 0), ("NVIDIA B200", 10, 0), ("Tesla K80", 3, 7)])
def test_a_gpu_that_mxnet_has_no_kernels_for_is_refused_by_name(monkeypatch, name, major, minor):
    give_gpus(monkeypatch, ("A100", 8, 0), (name, major, minor))
    assert devices.contexts(2) == [mx.gpu(0), mx.gpu(1)]  # another build than the wheels may have kernels for it
    monkeypatch.setattr(devices.cuda, "wheels", lambda: {"mxnet-cu112": "1.9.1"})
    monkeypatch.setattr(devices.cuda, "built_kernels", lambda: None)
    with pytest.raises(Error, match=f"{name}.* {major}.{minor}") as caught:
        devices.contexts(2)
    assert not isinstance(caught.value, UsageError) and "device='cpu'" in str(caught.value)
    assert ("compile" in str(caught.value)) == (major >= 9)
    assert devices.contexts(1) == [mx.gpu(0)]


class Driver:
    """Stands in for libcuda.so.1 on a machine with an A100. status: what cuInit returns."""

    def __init__(self, status):
        self.status = status

    def cuInit(self, flags):
        return self.status

    def cuDeviceGetCount(self, count):
        count._obj.value = 1
        return 0

    def cuDeviceGet(self, handle, index):
        handle._obj.value = 7

    def cuDeviceGetName(self, name, size, handle):
        name.value = b"A100" if handle.value == 7 else b""

    def cuDeviceGetAttribute(self, value, attribute, handle):
        value._obj.value = {75: 8, 76: 0}[attribute]


@pytest.mark.parametrize("status, gpus", [(0, [("A100", 8, 0)]), (100, []), (803, None)])
def test_the_driver_says_which_gpus_it_shows(monkeypatch, status, gpus):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(status))
    if gpus is None:
        with pytest.raises(Error, match="803"):
            cuda.driver_gpus()
    else:
        assert cuda.driver_gpus() == gpus
