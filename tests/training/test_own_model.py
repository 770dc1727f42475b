"""A registered network, with batch normalization and a frozen array, is trained, resumed and evaluated."""

import signal

import interrupts
import mxnet as mx
import numpy as np
import own_process
import pytest
import small_networks  # noqa: F401 (registers the network "normalized")

from gluon_mgpu import evaluate, implementations
from gluon_mgpu.training import records
from gluon_mgpu.training.settings import Settings

OPTIONS = {"model": "normalized", "dataset": "synthetic", "limit": 900, "seed": 1, "device": "cpu", "momentum": 0.9}


def train(devices=2, lr=0.05, **options):
    return implementations.train("highlevel", devices, 50, lr, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return train(epochs=1, out=folder), folder


def test_every_array_is_saved_and_all_but_the_frozen_one_are_trained(run):
    trained = evaluate.load(run[1], gpus=2, device="cpu").parameters
    mx.random.seed(1)
    initial = implementations.replicas("highlevel", [mx.cpu(0), mx.cpu(1)], Settings(model="normalized")).parameters()
    # Weights of three layers and one bias; two times gamma, beta, mean and variance.
    assert len(trained) == 3 + 1 + 2 * 4 and trained.keys() == initial.keys()
    assert [name for name, array in initial.items() if np.array_equal(array, trained[name])] == ["5.gamma"]
    velocities = [name for name in records.last(run[1])[0] if name.startswith("velocity/")]
    assert len(velocities) == len(trained) - 5  # not of the frozen array, the means and the variances


def test_it_is_resumed_with_its_running_statistics_and_another_number_of_devices_is_said(run, tmp_path, capsys):
    with interrupts.at_step(5, (signal.SIGINT, 0)):
        train(epochs=1, out=tmp_path)
    train(epochs=1, resume=tmp_path)
    np.testing.assert_equal(records.last(tmp_path)[0], records.last(run[1])[0])
    capsys.readouterr()
    train(1, epochs=2, resume=tmp_path)
    said = capsys.readouterr().err  # of larger shards: the result differs by more than rounding
    assert "batch normalization" in said


def test_a_command_that_does_not_know_the_network_says_so_in_one_line(run):
    done = own_process.command("evaluate", run[1], "--device", "cpu")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and "normalized" in done.stderr
