"""A registered network with 14 arrays, batch normalization and a frozen layer is trained, resumed and evaluated."""

import subprocess
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from gluon_mgpu import highlevel, networks
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import checkpoint, datasets, evaluate, settings
from gluon_mgpu.training.settings import Settings

CTX = [mx.cpu(0), mx.cpu(1)]
OPTIONS = {"model": "deep", "dataset": "synthetic", "limit": 900, "seed": 1, "device": "cpu", "momentum": 0.9}


def deep():
    net = nn.HybridSequential(prefix="deep_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, strides=2), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten())
        net[0].weight.grad_req = "null"  # frozen, though it is not a running statistic
        for units in (40, 30, 20):
            net.add(nn.Dense(units, activation="relu"))
        net.add(nn.Dense(10))
    return net


networks.register("deep", deep, mx.init.Xavier())


def train(devices=2, lr=0.05, **options):
    return highlevel.train(devices, 50, lr, **{**OPTIONS, **options})


def arrays(run):
    return checkpoint.load(run / "checkpoint.npz")[0]


def test_every_array_is_saved_and_all_but_the_frozen_one_are_trained(tmp_path):
    train(epochs=1, out=tmp_path)
    trained = evaluate.load(tmp_path, gpus=2, device="cpu").parameters
    mx.random.seed(1)
    initial = highlevel.Replicas(CTX, Settings(model="deep")).parameters()
    # A weight and a bias of the convolution and of each dense layer; gamma, beta, mean and variance.
    assert len(trained) == 5 * 2 + 4 and trained.keys() == initial.keys()
    assert [name for name, array in initial.items() if np.array_equal(array, trained[name])] == ["0.weight"]
    velocities = [name for name in arrays(tmp_path) if name.startswith("velocity/")]
    assert len(velocities) == len(trained) - 3  # not of the frozen weight, the mean and the variance


def test_its_run_is_evaluated_and_resumed(tmp_path, capsys):
    first = train(epochs=1, out=tmp_path / "run")
    trained = evaluate.load(tmp_path / "run", gpus=2, device="cpu")
    data = datasets.synthetic(900, 150, 1)
    correct = evaluate.scores(trained, data.test_images).argmax(1) == data.test_labels
    assert correct.mean() == first[-1].test_accuracy
    train(epochs=2, resume=tmp_path / "run")
    train(epochs=2, out=tmp_path / "whole")
    for name, array in arrays(tmp_path / "whole").items():
        np.testing.assert_array_equal(arrays(tmp_path / "run")[name], array, err_msg=name)
    capsys.readouterr()
    train(1, epochs=3, resume=tmp_path / "run")
    assert (
        "batch normalization" in capsys.readouterr().err
    )  # of larger shards: the result differs by more than rounding


def test_a_name_that_is_known_but_not_registered_is_a_usage_error():
    settings.add_model("function_of_scratch")
    with pytest.raises(UsageError):
        train(model="function_of_scratch")


def test_a_command_that_does_not_know_the_network_says_so_in_one_line(tmp_path):
    train(epochs=1, out=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "gluon_mgpu", "evaluate", tmp_path, "--device", "cpu"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and "model=deep" in done.stderr
