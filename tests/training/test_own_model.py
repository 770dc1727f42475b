"""A registered network with 14 arrays, batch normalization and a frozen layer is trained, resumed and evaluated."""

import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import runs
from mxnet.gluon import nn

from gluon_mgpu import highlevel, networks, scratch
from gluon_mgpu.training import checkpoint, datasets, evaluate
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


def test_its_run_is_evaluated_exported_and_resumed(tmp_path, capsys):
    first = train(epochs=1, out=tmp_path / "run")
    trained = evaluate.load(tmp_path / "run", gpus=2, device="cpu")
    data = datasets.synthetic(900, 150, 1)
    correct = evaluate.scores(trained, data.test_images).argmax(1) == data.test_labels
    assert correct.mean() == first[-1].test_accuracy
    evaluate.export(trained, str(tmp_path / "net"), data.test_images)  # compares the exported network's scores
    train(epochs=2, resume=tmp_path / "run")
    train(epochs=2, out=tmp_path / "whole")
    for name, array in arrays(tmp_path / "whole").items():
        np.testing.assert_array_equal(arrays(tmp_path / "run")[name], array, err_msg=name)
    capsys.readouterr()
    train(1, epochs=3, resume=tmp_path / "run")
    assert (
        "batch normalization" in capsys.readouterr().err
    )  # of larger shards: the result differs by more than rounding


def test_a_network_that_is_not_hybrid_is_trained_without_tuning(tmp_path):
    def plain():
        net = nn.Sequential()
        net.add(nn.Flatten(), nn.Dense(16, activation="relu"), nn.Dense(10))
        return net

    networks.register("plain", plain, mx.init.Xavier())
    losses = [epoch.train_loss for epoch in train(epochs=3, model="plain", tune=False, hybridize=False)]
    assert losses == sorted(losses, reverse=True)


def test_scratch_trains_and_resumes_a_function_of_images_and_parameters(tmp_path):
    def mlp(X, params):
        W1, b1, W2, b2 = params
        hidden = mx.nd.FullyConnected(X, W1, b1, num_hidden=16)
        return mx.nd.FullyConnected(mx.nd.tanh(hidden), W2, b2, num_hidden=10)

    shapes = [(16, 784), (16,), (10, 16), (10,)]
    options = {**OPTIONS, "net": mlp, "params": [mx.nd.random.normal(scale=0.05, shape=shape) for shape in shapes]}
    del options["model"]
    losses = [epoch.train_loss for epoch in scratch.train(2, 50, 0.05, epochs=2, out=tmp_path / "whole", **options)]
    assert losses[1] < losses[0]
    scratch.train(2, 50, 0.05, epochs=1, out=tmp_path / "run", **options)
    scratch.train(2, 50, 0.05, epochs=2, resume=tmp_path / "run", **options)
    assert [arrays(tmp_path / "run")[f"p{i}"].shape for i in range(4)] == shapes
    for name, array in arrays(tmp_path / "whole").items():
        np.testing.assert_array_equal(arrays(tmp_path / "run")[name], array)


WORKER = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from gluon_mgpu.distributed import process, serve
here = process.current()
if here.role != "worker":
    serve.serve(here)
    sys.exit()
import test_own_model
test_own_model.train(1, epochs=1, out=sys.argv[2], kvstore="dist_sync")
"""


def test_two_workers_train_it_as_two_contexts_do(tmp_path):
    program = tmp_path / "worker.py"
    program.write_text("import gluon_mgpu\ngluon_mgpu.configure(contexts=2)" + WORKER)
    folders = f"{Path(__file__).parent}:{Path(runs.__file__).parent}"
    line = [sys.executable, str(program), folders, str(tmp_path / "workers")]
    status, _, err = runs.run("dist_sync", 2, program=line)
    assert status == 0, err
    train(epochs=1, out=tmp_path / "alone")
    found, expected = (arrays(tmp_path / name) for name in ("workers", "alone"))
    for name, array in expected.items():
        # A sum of two gradients has no order. Running statistics are averaged over devices in each of 18 steps, but
        # over workers at the end: two roundings per step.
        rtol = 2 * 18 * np.finfo(np.float32).eps if "running" in name else 0
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=rtol * np.abs(array).max(), err_msg=name)


def test_a_command_that_does_not_know_the_network_says_so_in_one_line(tmp_path):
    train(epochs=1, out=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "gluon_mgpu", "evaluate", tmp_path, "--device", "cpu"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1) and "model=deep" in done.stderr
