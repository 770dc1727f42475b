"""The tour through the notebooks' inspection cells: what it prints, against NumPy and the notebooks' own output."""

import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

from gluon_mgpu import scratch, walkthrough
from gluon_mgpu.runtime import devices
from gluon_mgpu.training import datasets, shared_memory

SCRIPT = Path(__file__).parents[1] / "scripts" / "walkthrough.py"
IMPLS = ["scratch", "highlevel"]
ROUNDING = 5e-4  # three digits are printed


@pytest.fixture
def tour(capsys):
    """What the tour prints on CPU contexts, as its six cells."""

    def walk(impl, gpus, seed=0):
        walkthrough.walk(impl, gpus, dataset="synthetic", device="cpu", seed=seed)
        printed = capsys.readouterr().out
        assert [line[0] for line in re.findall(r"^\d\. \w", printed, re.M)] == list("123456")
        return re.split(r"^\d\. ", printed, flags=re.M)[1:]

    return walk


def arrays(text):
    """[(array, shape, context)] of each NDArray that is printed in a text."""
    found = []
    for numbers, shape, context in re.findall(r"(^\[[^<]*)<NDArray ([\dx]+) @(\w+\(\d+\))>", text, re.M):
        shape = tuple(map(int, shape.split("x")))
        values = np.array(re.sub(r"[\[\]]", " ", numbers).split(), float).reshape(shape)
        found.append((values, shape, context))
    return found


def values(text):
    return [array for array, _, _ in arrays(text)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_b1_and_its_gradient_are_20_zeros_on_the_first_device(impl, gpus, tour):
    b1, gradient = arrays(tour(impl, gpus)[0])
    for array, shape, context in (b1, gradient):
        assert (shape, context) == ((20,), "cpu(0)") and not array.any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_device_holds_the_sum_after_allreduce(impl, gpus, tour):
    before, after = (arrays(part) for part in tour(impl, gpus)[1].split("After:"))
    contexts = [f"cpu({i})" for i in range(gpus)]
    assert [c for _, _, c in before] == [c for _, _, c in after] == contexts
    assert [a.tolist() for a, _, _ in before] == [[[i + 1, i + 1]] for i in range(gpus)]
    assert [a.tolist() for a, _, _ in after] == [[[sum(range(gpus + 1))] * 2]] * gpus  # the notebook, on 2: [[3, 3]]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gpus, rows", [("0", [6]), ("0,2", [3, 3]), ("0,1,2,3", [2, 2, 1, 1])])
def test_a_batch_is_split_in_order_as_even_as_can_be(impl, gpus, rows, tour):
    text = tour(impl, gpus + ",")[2]
    whole, *shards = arrays(text)
    np.testing.assert_array_equal(whole[0], np.arange(24).reshape(6, 4))
    assert [shape for _, shape, _ in shards] == [(n, 4) for n in rows]
    np.testing.assert_array_equal(np.concatenate([shard for shard, _, _ in shards]), whole[0])
    contexts = [f"cpu({i})" for i in gpus.split(",")]
    assert [context for _, _, context in shards] == contexts
    assert re.findall(r"^\(4, 1, 28, 28\) and \(4,\) on (.*)$", text, re.M) == contexts


def test_both_implementations_print_the_same_numbers_from_one_seed_and_others_from_another(tour):
    by_hand, by_gluon, other = tour("scratch", 4), tour("highlevel", 4), tour("scratch", 4, seed=1)
    for cell in (3, 4):  # scores; weights and gradients
        for a, b in zip(values(by_hand[cell]), values(by_gluon[cell])):
            np.testing.assert_allclose(a, b, atol=2 * ROUNDING)
        assert np.abs(values(by_hand[cell])[0] - values(other[cell])[0]).max() > 0.01
    assert by_hand == tour("scratch", 4)


def test_the_scores_are_those_of_the_first_images_of_the_data_set_whatever_the_number_of_devices(tour):
    data = datasets.synthetic(16, 100, seed=0)
    mx.random.seed(0)
    images = mx.nd.array(data.train_images / 255)
    expected = scratch.lenet(images, scratch.init_params(walkthrough.SCALE)).asnumpy()
    shards = arrays(tour("highlevel", 4)[3])
    assert [(shape, context) for _, shape, context in shards] == [((4, 10), f"cpu({i})") for i in range(4)]
    np.testing.assert_allclose(np.concatenate([shard for shard, _, _ in shards]), expected, atol=ROUNDING)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_the_step_that_is_shown_is_the_mean_gradient_of_the_shards_times_the_learning_rate(impl, gpus, tour):
    printed = values(tour(impl, gpus)[4])
    weights, gradients, [after] = printed[:gpus], printed[gpus : 2 * gpus], printed[2 * gpus :]
    for replica in weights:
        np.testing.assert_array_equal(replica, weights[0])
    expected = weights[0] - 0.2 * sum(gradients) / (4 * gpus)
    np.testing.assert_allclose(after, expected, atol=3 * ROUNDING)
    assert np.abs(after - weights[0]).max() > 10 * ROUNDING


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gpus", [2, 4])
def test_only_the_gradients_before_the_update_differ_between_the_contexts(impl, gpus, tour):
    said = re.findall(rf"^(.*): the same on all {gpus} contexts: (\w+)$", tour(impl, gpus)[4], re.M)
    assert said == [
        ("channel 0", "True"),
        ("its gradient", "False"),
        ("all 8 gradients", "True"),
        ("all 8 parameters", "True"),
    ]


@pytest.mark.parametrize("impl", IMPLS)
def test_replicas_that_are_updated_without_allreduce_are_said_to_differ(impl, tour, monkeypatch):
    for module in (scratch, shared_memory):
        monkeypatch.setattr(module, "allreduce", lambda data, *_: None)
    monkeypatch.setattr(gluon.Trainer, "_allreduce_grads", lambda self: None)
    text = tour(impl, 2)[4]
    assert "all 8 gradients: the same on all 2 contexts: False" in text
    assert "all 8 parameters: the same on all 2 contexts: False" in text


@pytest.mark.parametrize("impl", IMPLS)
def test_with_one_device_it_says_that_there_is_nothing_to_compare(impl, tour):
    cell = tour(impl, 1)[4]
    assert cell.count("on one context, so there is nothing to compare") == 4 and "True" not in cell


def test_gluon_refuses_a_context_that_the_net_is_not_on_with_a_runtime_error(tour):
    said = " ".join(tour("highlevel", "0,2")[5].split())
    assert "RuntimeError: Parameter 'cnn_conv0_weight' was not initialized on context cpu(1)." in said
    assert said.endswith("It was only initialized on [cpu(0), cpu(2)].")


def test_scratch_computes_across_cpu_contexts_and_shows_mxnets_error_where_the_kinds_differ(tour, monkeypatch):
    assert "No error: it computed scores on cpu(2), since" in tour("scratch", 2)[5]
    real = scratch.lenet

    def lenet(X, params):  # as MXNet does when X is on a CPU and the parameters are on a GPU
        if X.context != params[0].context:
            raise mx.MXNetError(
                'Traceback (most recent call last):\n  File "utils.h", line 1\nMXNetError: not on gpu(0)'
            )
        return real(X, params)

    monkeypatch.setattr(scratch, "lenet", lenet)
    assert tour("scratch", 2)[5].endswith("\nMXNetError: not on gpu(0)\n")


@pytest.mark.parametrize("impl", IMPLS)
def test_on_a_machine_with_fewer_gpus_it_goes_on_with_those_and_says_so_in_one_line(impl, capsys, monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    monkeypatch.setattr(devices, "_refuse_gpu_without_kernels", lambda index: None)
    monkeypatch.setattr(mx, "gpu", mx.cpu)  # the stand-in for a GPU computes on a CPU context
    walkthrough.walk(impl, 4, dataset="synthetic")
    said = capsys.readouterr()
    assert said.err == ("gluon_mgpu: 4 GPUs asked for, and this machine has 2 GPUs, indices 0 to 1: going on with 2\n")
    assert said.out.startswith(f"{impl} on [cpu(0), cpu(1)], with synthetic\n")
    assert "the same on all 2 contexts: True" in said.out


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_script_and_the_installed_command_print_the_same_six_cells_of_fashion_mnist_on_4_devices(impl):
    a, b = run(SCRIPT, "--impl", impl), run("-m", "gluon_mgpu", "walkthrough", "--impl", impl, "--device", "cpu")
    assert a.returncode == b.returncode == 0, a.stderr + b.stderr
    assert a.stdout == b.stdout and a.stdout.count("\n6. ") == 1
    assert a.stdout.startswith(f"{impl} on [cpu(0), cpu(1), cpu(2), cpu(3)], with fashion-mnist\n")
    assert b.stderr == "" and a.stderr.count("\n") == 1 and "using 4 CPU contexts" in a.stderr
    assert max(map(len, a.stdout.splitlines())) <= 100


def test_what_cannot_be_shown_is_refused_in_one_line():
    done = run(SCRIPT, "--gpus", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --gpus 0: give at least 1 device and at most 1024\n"
