"""A network of one's own, deeper than LeNet and with batch normalization, is trained, kept and read as any other."""

import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
import runs
from mxnet.gluon import nn

from gluon_mgpu import highlevel
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import checkpoint, datasets, evaluate, records, settings
from gluon_mgpu.training.settings import Settings

CTX = [mx.cpu(0), mx.cpu(1)]
OPTIONS = {"model": "deep", "dataset": "synthetic", "limit": 900, "seed": 1, "device": "cpu", "momentum": 0.9}


def deep():
    net = nn.HybridSequential(prefix="deep_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, strides=2), nn.BatchNorm(), nn.Activation("relu"), nn.Flatten())
        net[0].weight.grad_req = "null"  # frozen: its gradient is not wanted, and it is no running statistic
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
    ended = []
    for lr in (1e-30, 0.05):
        highlevel.train(2, 50, lr, epochs=1, out=tmp_path / str(lr), **OPTIONS)
        ended.append(evaluate.load(tmp_path / str(lr), None, 1, "cpu").parameters)
    untrained, trained = ended
    mx.random.seed(1)
    drawn = highlevel.Replicas(CTX, Settings(model="deep")).parameters()
    # A weight and a bias of the convolution and of each dense layer; gamma, beta, mean and variance.
    assert len(trained) == 5 * 2 + 4 and trained.keys() == drawn.keys()
    statistics = {name for name in drawn if "running" in name}
    assert {name for name, array in drawn.items() if not np.allclose(array, untrained[name], atol=1e-20)} == statistics
    assert [name for name, array in drawn.items() if np.array_equal(array, trained[name])] == ["0.weight"]


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


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from gluon_mgpu.distributed import process as place, serve
here = place.place()
if here.role != "worker":
    serve.serve(here)
    sys.exit()
import mxnet as mx, test_own_model
from gluon_mgpu import highlevel
highlevel.add_model("deep", test_own_model.deep, mx.init.Xavier())
highlevel.train(1, 50, 0.05, epochs=1, out=sys.argv[2], kvstore="dist_sync", **test_own_model.OPTIONS)
"""


def test_two_workers_train_it_as_two_contexts_do_with_its_running_statistics(tmp_path):
    program = tmp_path / "worker.py"
    program.write_text("import gluon_mgpu\ngluon_mgpu.configure(contexts=2)" + WORKER)
    line = [sys.executable, str(program), str(Path(__file__).parent), str(tmp_path / "workers")]
    status, _, err = runs.run("dist_sync", 2, program=line)
    assert status == 0, err
    highlevel.train(2, 50, 0.05, epochs=1, out=tmp_path / "alone", **OPTIONS)
    found, expected = (evaluate.load(tmp_path / name, None, 1, "cpu").parameters for name in ("workers", "alone"))
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_commands_say_that_they_do_not_have_it(tmp_path, capsys, monkeypatch):
    highlevel.train(2, 50, 0.05, epochs=1, out=tmp_path / "run", **OPTIONS)
    monkeypatch.setattr(settings, "MODELS", ["lenet"])
    monkeypatch.setattr(records, "MODELS", ["lenet"])
    with pytest.raises(Error, match="model deep: choose one of lenet.*: give the network with highlevel.add_model"):
        evaluate.load(tmp_path / "run", None, 1, "cpu")
