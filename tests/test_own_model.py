"""A network of one's own, deeper than LeNet and with batch normalization, is trained, kept and read as any other."""

import mxnet as mx
import numpy as np
import pytest
from mxnet.gluon import nn

from gluon_mgpu import checkpoint, datasets, evaluate, highlevel, settings
from gluon_mgpu.settings import Settings

CTX = [mx.cpu(0), mx.cpu(1)]
OPTIONS = {"model": "deep", "dataset": "synthetic", "limit": 900, "seed": 1, "device": "cpu", "momentum": 0.9}


def deep():
    net = nn.HybridSequential(prefix="deep_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, strides=2), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten())
        for units in (40, 30, 20):
            net.add(nn.Dense(units, activation="relu"))
        net.add(nn.Dense(10))
    return net


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(highlevel, "MODELS", {**highlevel.MODELS})
    monkeypatch.setattr(settings, "MODELS", settings.MODELS[:])
    monkeypatch.setattr(highlevel, "settings_models", settings.MODELS)
    highlevel.add_model("deep", deep, mx.init.Xavier())


def test_every_array_of_it_is_trained_and_is_in_the_checkpoint(tmp_path):
    mx.random.seed(1)
    before = highlevel.Replicas(CTX, Settings(model="deep")).parameters()
    highlevel.train(2, 50, 0.05, epochs=1, out=tmp_path / "run", **OPTIONS)
    after = evaluate.load(tmp_path / "run", None, 1, "cpu").parameters
    # A weight and a bias of the convolution and of each dense layer; gamma, beta, mean and variance.
    assert len(after) == 5 * 2 + 4 and after.keys() == before.keys()
    assert [name for name, array in after.items() if np.array_equal(array, before[name])] == []


def test_its_run_is_evaluated_exported_and_resumed_as_it_was(tmp_path, capsys):
    first = highlevel.train(2, 50, 0.05, epochs=1, out=tmp_path / "run", **OPTIONS)
    trained = evaluate.load(tmp_path / "run", None, 2, "cpu")
    data = datasets.synthetic(900, 150, 1)
    right = evaluate.scores(trained, data.test_images).argmax(1) == data.test_labels
    assert right.mean() == first[-1].test_accuracy > 0.15
    evaluate.export(trained, str(tmp_path / "net"), data.test_images)  # refuses where the scores differ
    highlevel.train(2, 50, 0.05, epochs=2, resume=tmp_path / "run", **OPTIONS)
    highlevel.train(2, 50, 0.05, epochs=2, out=tmp_path / "whole", **OPTIONS)
    resumed, whole = (checkpoint.load(tmp_path / name / "checkpoint.npz")[0] for name in ("run", "whole"))
    for name, array in whole.items():
        np.testing.assert_array_equal(resumed[name], array)
    capsys.readouterr()
    highlevel.train(1, 50, 0.05, epochs=3, resume=tmp_path / "run", **OPTIONS)
    assert "batch normalization is of each device's shard" in capsys.readouterr().err


def test_a_net_for_images_of_another_shape_learns_its_shapes_and_steps_with_an_idle_device():
    net = deep()
    highlevel.initialize(net, CTX, init=mx.init.Xavier(), shape=(3, 20, 24))
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=False)
    X, y = mx.nd.random.uniform(shape=(1, 3, 20, 24)), mx.nd.array([3])
    (losses,) = highlevel.train_batch(X, y, net, CTX, trainer)
    assert losses.shape == (1,)
    assert list(net.collect_params().values())[0].shape == (8, 3, 3, 3)
    for p in net.collect_params().values():
        if p.grad_req != "null":  # the device without an example has the same update
            np.testing.assert_array_equal(*(p.data(c).asnumpy() for c in CTX))
