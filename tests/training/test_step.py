"""Batch normalization and a frozen array in a step. tests/test_features.py compares steps with plain loops."""

import mxnet as mx
import numpy as np
import pytest
import small_networks
from test_partition import batch

from gluon_mgpu import evaluate, networks, train
from gluon_mgpu.training import models
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.folder import read
from gluon_mgpu.training.model import read_arrays
from gluon_mgpu.training.step import assemble
from gluon_mgpu.training.workers import Group

networks.register("other names", small_networks.normalized, mx.init.Xavier(), names="abcdefghijkl")


def normalized(seed=0, model="normalized", **settings):
    mx.random.seed(seed)
    return models.create_model("highlevel", [mx.cpu(0), mx.cpu(1)], Config("highlevel", model=model, **settings))


@pytest.mark.parametrize("model, hybridize", [("normalized", True), ("normalized", False), ("other names", True)])
def test_replicas_with_batch_normalization_stay_equal(model, hybridize):
    model = normalized(model=model, shares=(3, 1), hybridize=hybridize)
    step = assemble(model, Group())
    for n in (8, 5, 2, 8):
        step(*batch(n), 0.1)
    np.testing.assert_equal(read_arrays(model, 1), read_arrays(model, 0))


def test_every_array_is_saved_and_all_but_the_frozen_one_are_trained(tmp_path):
    options = {"model": "normalized", "dataset": "synthetic", "limit": 900, "seed": 1, "device": "cpu", "epochs": 1}
    train("highlevel", 2, 50, 0.05, **options, momentum=0.9, out=tmp_path / "run")
    run = tmp_path / "run"
    trained = read_arrays(evaluate.load(run, gpus=2, device="cpu").model)
    initial = read_arrays(normalized(seed=1))
    # Weights of three layers and one bias; two times gamma, beta, mean and variance.
    assert len(trained) == 3 + 1 + 2 * 4 and trained.keys() == initial.keys()
    assert [name for name, array in initial.items() if np.array_equal(array, trained[name])] == ["5.gamma"]
    velocities = [name for name in read(run).arrays if name.startswith("velocity/")]
    assert len(velocities) == len(trained) - 5  # none for the frozen array, the means and the variances
