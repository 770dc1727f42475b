import ctypes

import mxnet as mx
import pytest

from gluon_mgpu import UsageError
from gluon_mgpu.runtime import devices
from gluon_mgpu.runtime.errors import Error


@pytest.mark.parametrize("text, indices", [("2", [0, 1]), ("1", [0]), ("0,2", [0, 2]), ("3,", [3]), (" 1, 0 ", [1, 0])])
def test_gpus_is_a_number_of_devices_or_a_list_of_indices(text, indices):
    assert devices.parse(text) == indices


@pytest.mark.parametrize(
    "text, says",
    [
        ("0", "at least 1"),
        ("-1", "at least 1"),
        ("0,-2", "no device -2"),
        ("1000000000000", "at most 1024"),
        ("0,99999999999", "no device 99999999999"),
        ("1,0,1", "device 1 is named twice"),
        ("two", "how many devices"),
        ("", "how many devices"),
        ("1.5", "how many devices"),
        ("0,,1", "how many devices"),
    ],
)
def test_what_is_no_set_of_devices_is_refused_with_the_text_and_the_reason(text, says):
    with pytest.raises(UsageError, match=says) as caught:
        devices.parse(text)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "gpus, device, says", [([0, 0], "cpu", "twice"), ([-1], "cpu", "no device -1"), (1, "tpu", "'tpu'")]
)
def test_a_caller_from_python_is_refused_the_same_things(gpus, device, says):
    with pytest.raises(UsageError, match=says):
        devices.contexts(gpus, device)


def test_auto_takes_as_many_cpu_contexts_where_there_is_no_gpu_and_says_so_in_one_line(capsys):
    assert devices.contexts("0,2") == [mx.cpu(0), mx.cpu(2)]
    said = capsys.readouterr().err
    assert "using 2 CPU contexts" in said and said.count("\n") == 1


def test_cpu_contexts_that_were_asked_for_are_taken_in_silence(capsys):
    assert devices.contexts(3, "cpu") == [mx.cpu(i) for i in range(3)]
    assert capsys.readouterr() == ("", "")


def test_a_gpu_that_was_asked_for_and_is_not_there_is_refused():
    with pytest.raises(UsageError, match="--device gpu: .*--device cpu"):
        devices.contexts(1, "gpu")


class Driver:
    """Stands in for libcuda.so.1, with the GPUs of a machine: (name, major, minor)."""

    def __init__(self, gpus):
        self.gpus = gpus

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, handle, index):
        handle._obj.value = index
        return 0

    def cuDeviceGetName(self, name, size, handle):
        name.value = self.gpus[handle.value][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value, attribute, handle):
        value._obj.value = self.gpus[handle.value][{75: 1, 76: 2}[attribute]]
        return 0


@pytest.fixture
def machine(monkeypatch):
    def make(*gpus):
        monkeypatch.setattr(mx.context, "num_gpus", lambda: len(gpus))
        real = ctypes.CDLL
        monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(gpus) if name == "libcuda.so.1" else real(name))

    return make


def test_auto_takes_the_gpus_that_mxnet_has_kernels_for(machine, capsys):
    machine(("GeForce GTX 1080", 6, 1), ("A100", 8, 0), ("RTX 4090", 8, 9))
    assert devices.contexts(2) == [mx.gpu(0), mx.gpu(1)]
    assert devices.contexts("0,2", "gpu") == [mx.gpu(0), mx.gpu(2)]
    assert devices.contexts(2, "cpu") == [mx.cpu(0), mx.cpu(1)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("gpus, says", [(3, "3 GPUs asked for"), ("0,5", "GPU 5 asked for")])
def test_more_gpus_than_the_machine_has_are_refused_with_what_there_is(machine, gpus, says):
    machine(("A100", 8, 0), ("A100", 8, 0))
    with pytest.raises(UsageError, match=f"{says}, and this machine has 2 GPUs, indices 0 to 1"):
        devices.contexts(gpus)


def test_fewer_gpus_than_asked_are_taken_where_the_caller_allows_it_and_a_line_says_so(machine, capsys):
    machine(("A100", 8, 0), ("A100", 8, 0))
    assert devices.contexts(4, fewer=True) == [mx.gpu(0), mx.gpu(1)]
    assert devices.contexts("1,5", fewer=True) == [mx.gpu(1)]
    has = "this machine has 2 GPUs, indices 0 to 1"
    assert capsys.readouterr().err.splitlines() == [
        f"gluon_mgpu: 4 GPUs asked for, and {has}: going on with 2",
        f"gluon_mgpu: GPU 5 asked for, and {has}: going on with 1",
    ]
    with pytest.raises(UsageError, match="GPU 5 asked for"):
        devices.contexts("2,5", fewer=True)


@pytest.mark.parametrize("name, major, minor", [("NVIDIA H200", 9, 0), ("NVIDIA B200", 10, 0), ("Tesla K80", 3, 7)])
def test_a_gpu_that_mxnet_has_no_kernels_for_is_refused_by_name(machine, name, major, minor):
    machine(("A100", 8, 0), (name, major, minor))
    with pytest.raises(Error, match=f"GPU 1, {name}, has compute capability {major}.{minor}: .*5.x to 8.x"):
        devices.contexts(2)
    assert devices.contexts(1) == [mx.gpu(0)]
