import mxnet as mx
import pytest

from gluon_mgpu.runtime import devices, splitting
from gluon_mgpu.runtime.errors import Error, UsageError


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
    with pytest.raises(UsageError) as caught:
        devices.parse(given)
    assert (caught.value.name, caught.value.value) == ("num_gpus", given)


def test_auto_takes_cpu_contexts_if_there_is_no_gpu_and_training_says_so_in_one_line(capsys):
    ctx = devices.contexts("0,2")
    assert ctx == [mx.cpu(0), mx.cpu(2)] and devices.contexts(1, "cpu") == [mx.cpu(0)]
    assert capsys.readouterr() == ("", "")
    devices.say_if_no_gpu(ctx, "auto")
    assert capsys.readouterr().err.count("\n") == 1
    devices.say_if_no_gpu(ctx, "cpu")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_a_device_that_is_not_there_is_a_usage_error(device):
    with pytest.raises(UsageError) as caught:
        devices.contexts(1, device)
    assert (caught.value.name, caught.value.value) == ("device", device)


def give_gpus(monkeypatch, *gpus):
    """Give this machine GPUs: (name, major, minor)."""
    monkeypatch.setattr(mx.context, "num_gpus", lambda: len(gpus))
    monkeypatch.setattr(devices, "driver_gpus", lambda: gpus)


def test_auto_takes_the_gpus_that_mxnet_has_kernels_for(monkeypatch, capsys):
    give_gpus(monkeypatch, ("GeForce GTX 1080", 6, 1), ("A100", 8, 0), ("RTX 4090", 8, 9))
    assert devices.contexts(2) == [mx.gpu(0), mx.gpu(1)]
    assert devices.contexts("0,2", "gpu") == [mx.gpu(0), mx.gpu(2)]
    assert devices.contexts(2, "cpu") == [mx.cpu(0), mx.cpu(1)]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("gpus", [3, "0,5"])
def test_more_gpus_than_the_machine_has_are_a_usage_error(monkeypatch, gpus):
    give_gpus(monkeypatch, ("A100", 8, 0), ("A100", 8, 0))
    with pytest.raises(UsageError, match=r"2 GPUs \(indices 0 to 1\)"):
        devices.contexts(gpus)


def test_fewer_gpus_are_used_if_the_caller_allows_it_and_a_line_says_so(monkeypatch, capsys):
    give_gpus(monkeypatch, ("A100", 8, 0), ("A100", 8, 0))
    for asked, found in ((4, [mx.gpu(0), mx.gpu(1)]), ("1,5", [mx.gpu(1)])):
        assert devices.contexts(asked, fewer=True) == found
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(UsageError):
        devices.contexts("2,5", fewer=True)


@pytest.mark.parametrize("name, major, minor", [("NVIDIA H200", 9, 0), ("NVIDIA B200", 10, 0), ("Tesla K80", 3, 7)])
def test_a_gpu_that_mxnet_has_no_kernels_for_is_refused_by_name(monkeypatch, name, major, minor):
    give_gpus(monkeypatch, ("A100", 8, 0), (name, major, minor))
    with pytest.raises(Error, match=f"{name}.* {major}.{minor}") as caught:
        devices.contexts(2)
    assert not isinstance(caught.value, UsageError) and "device=cpu" in str(caught.value)
    assert devices.contexts(1) == [mx.gpu(0)]


@pytest.mark.parametrize(
    "examples, shares, sizes",
    [
        (6, (1, 1, 1), [2, 2, 2]),
        (10, (80, 10, 10), [8, 1, 1]),
        (5, (98, 1, 1), [3, 1, 1]),  # every device gets an example
        (2, (1, 1, 98), [1, 1, 0]),
    ],
)
def test_shards_are_in_proportion_to_the_shares(examples, shares, sizes):
    assert splitting.shard_sizes(examples, 3, shares) == sizes
