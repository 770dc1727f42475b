"""The notebooks' inspection cells: what they print, compared with NumPy and with the notebooks' own output."""

import re

import lenet64
import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon
from runs import arrays, call

from gluon_mgpu import scratch, walkthrough
from gluon_mgpu.commands.walkthrough import walkthrough as command
from gluon_mgpu.training import datasets

ROUNDING = 5e-4  # three digits are printed
each_impl = pytest.mark.parametrize("impl", ["scratch", "highlevel"])


def cells(capsys, impl, gpus, seed=0):
    """What the command prints on CPU contexts: the six cells."""
    options = ("--impl", impl, "--gpus", gpus, "--seed", seed, "--dataset", "synthetic", "--device", "cpu")
    status, out, err = call(capsys, command, *options)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    head, *printed = re.split(r"^(\d)\. ", out, flags=re.M)
    assert head.startswith(f"{impl} on [cpu(0)") and printed[::2] == list("123456")
    return printed[1::2]


@each_impl
@pytest.mark.parametrize("gpus, rows", [("0,", [6]), ("0,2", [3, 3]), ("0,1,2,3", [2, 2, 1, 1])])
def test_the_printed_arrays_are_the_notebooks(impl, gpus, rows, capsys):
    biases, sums, split, _, convolution, _ = cells(capsys, impl, gpus)
    contexts = [f"cpu({i})" for i in re.findall(r"\d", gpus)]
    for array, context in arrays(biases):
        assert (array.tolist(), context) == ([0] * 20, "cpu(0)")
    before, after = (arrays(part) for part in sums.split("After:"))
    assert [(a.tolist(), c) for a, c in before] == [([[i + 1, i + 1]], c) for i, c in enumerate(contexts)]
    total = sum(range(1, len(contexts) + 1))
    assert [(a.tolist(), c) for a, c in after] == [([[total, total]], c) for c in contexts]  # on 2 devices [[3. 3.]]
    (batch, _), *shards = arrays(split)
    assert [(len(shard), context) for shard, context in shards] == list(zip(rows, contexts))
    np.testing.assert_array_equal(batch, np.arange(24).reshape(6, 4))
    np.testing.assert_array_equal(np.concatenate([shard for shard, _ in shards]), batch)
    assert re.findall(r"^\(4, 1, 28, 28\) and \(4,\) on (.*)$", split, re.M) == contexts
    printed = [array for array, _ in arrays(convolution)]
    weights, gradients, [updated] = np.split(printed, [len(contexts), 2 * len(contexts)])
    for replica in weights:
        np.testing.assert_array_equal(replica, weights[0])
    expected = weights[0] - walkthrough.LR * sum(gradients) / (walkthrough.EXAMPLES * len(contexts))
    np.testing.assert_allclose(updated, expected, atol=3 * ROUNDING)
    assert np.abs(updated - weights[0]).max() > 10 * ROUNDING


@each_impl
def test_the_scores_are_those_of_the_first_images_and_depend_on_the_seed(impl, capsys):
    data = datasets.synthetic(16, 100, seed=0)
    mx.random.seed(0)
    params = [p.asnumpy().astype(np.float64) for p in scratch.init_params(0.01 * walkthrough.SCALE)]
    shards = arrays(cells(capsys, impl, 4)[3])
    assert [context for _, context in shards] == [f"cpu({i})" for i in range(4)]
    found = np.concatenate([shard for shard, _ in shards])
    np.testing.assert_allclose(found, lenet64.scores(params, data.train_images / 255), atol=ROUNDING)
    assert np.abs(found[:4] - arrays(cells(capsys, impl, 4, seed=1)[3])[0][0]).max() > 0.01


@each_impl
@pytest.mark.parametrize("broken", [False, True])
def test_only_the_gradients_before_the_update_differ_unless_the_allreduce_is_missing(impl, broken, capsys, monkeypatch):
    if broken:
        monkeypatch.setattr(scratch, "allreduce", lambda data: None)
        monkeypatch.setattr(gluon.Trainer, "_allreduce_grads", lambda self: None)
    said = re.findall(r"^(.*): the same on all 2 contexts: (\w+)$", cells(capsys, impl, 2)[4], re.M)
    assert [name for name, _ in said] == ["channel 0", "its gradient", "all 8 gradients", "all 8 parameters"]
    assert [same for _, same in said] == ["True", "False", str(not broken), str(not broken)]
    assert "True" not in cells(capsys, impl, 1)[4]  # one device has nothing to compare


def test_gluon_refuses_a_context_without_a_replica_and_scratch_shows_what_mxnet_does(capsys):
    assert "RuntimeError: Parameter 'cnn_conv0_weight' was not" in cells(capsys, "highlevel", "0,2")[5]
    assert "No error" in cells(capsys, "scratch", 2)[5]
