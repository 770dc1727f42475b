"""Settings, data and lessons that contradict each other, or the run that is resumed."""

import importlib.util
import shutil

import mxnet as mx
import pytest
from mxnet.gluon import nn

from gluon_mgpu import UsageError, evaluate, highlevel, networks, scratch, train
from gluon_mgpu.data import datasets
from gluon_mgpu.training import lessons, registry
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import create_model, read_arrays

CPUS = [mx.cpu(0), mx.cpu(1)]
OPTIONS = {"gpus": 2, "device": "cpu", "dataset": "synthetic", "limit": 100, "batch_size": 20, "seed": 1}


registry.register("9 classes", lambda: nn.Dense(9))
registry.register("11 classes", lambda: nn.Dense(11))
registry.register("with init", networks.resnet18, mx.init.Xavier())
WITHOUT_INIT = lessons.load("highlevel", initialize=lambda net, ctx: highlevel.initialize(net, ctx))


def refused(name, **options):
    with pytest.raises(UsageError) as error:
        train(**options)
    assert error.value.name == name and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("batch_size", {"gpus": 3, "limit": 22}),
        ("shares", {"gpus": 3, "shares": (80, 20)}),
        ("shares", {"gpus": 1, "shares": (80, 20)}),
        ("data_dir", {"dataset": datasets.synthetic(100, 100), "data_dir": "elsewhere"}),
        ("resume", {"resume": "", "out": None}),
        ("model", {"model": "resnet18"}),
        ("model", {"impl": "highlevel", "model": "none"}),
        ("model", {"impl": "highlevel", "model": "9 classes"}),
        ("model", {"impl": "highlevel", "model": "11 classes"}),
        ("model", {"impl": WITHOUT_INIT, "model": "with init"}),
        ("weight_decay", {"impl": "scratch", "weight_decay": 0.1}),
        ("momentum", {"impl": "scratch", "momentum": 0.9}),
        *(("impl", {"impl": impl}) for impl in ("torch", "nowhere.py", ".", "", None)),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused_before_anything_is_printed_or_written(
    name, settings, tmp_path, capsys
):
    refused(name, **{**OPTIONS, "out": tmp_path / "run", **settings})
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def test_an_imported_copy_of_scratch_is_an_own_lesson(tmp_path):
    shutil.copy(scratch.__file__, tmp_path / "scratch.py")
    spec = importlib.util.spec_from_file_location("scratch", tmp_path / "scratch.py")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert lessons.name_of(copy) == str(tmp_path / "scratch.py")
    train(copy, **OPTIONS, epochs=1, out=tmp_path / "run")
    refused("resume", resume=tmp_path / "run", epochs=2)  # a checkpoint does not choose code to run
    with pytest.raises(UsageError):
        evaluate.load(tmp_path / "run")


def test_a_run_is_not_resumed_on_other_data_of_the_same_name(tmp_path):
    options = {**OPTIONS, "dataset": datasets.synthetic(100, 100, seed=9), "limit": None}
    train(**options, epochs=1, out=tmp_path)
    refused("data_dir", resume=tmp_path, epochs=2, dataset=datasets.synthetic(100, 100, seed=8))


def test_fewer_epochs_than_the_recorded_warm_up_has_are_the_users_mistake():
    recorded = Config(**Config.parse(OPTIONS), epochs=4, warmup_epochs=3)
    with pytest.raises(UsageError) as error:
        recorded.resumed({"epochs": 3})
    assert error.value.name == "epochs"


def test_a_resumed_run_keeps_its_shares_with_the_same_number_of_devices():
    recorded = Config(**Config.parse(OPTIONS), shares=(60, 40))
    assert recorded.resumed({"kvstore": "mpi"}).shares == (60, 40)
    assert recorded.resumed({"gpus": (0, 1, 2)}).shares is None


def test_empty_shares_are_no_shares():
    assert Config.parse({"shares": ()}) == {"shares": None}


def test_a_parameter_that_two_layers_share_is_trained_once():
    def lenet():
        net = nn.HybridSequential()
        with net.name_scope():
            net.add(nn.Dense(16), nn.Dense(16, in_units=16))
            net.add(nn.Dense(16, in_units=16, params=net[1].params), nn.Dense(10))
        return net

    model = create_model(lessons.load("highlevel", lenet=lenet), CPUS)
    before = read_arrays(model)
    model.step(mx.nd.random.uniform(shape=(8, 1, 28, 28)), mx.nd.zeros(8), 0.1)
    shared = [name for name in before if before[name].shape == (16, 16)]
    assert len(shared) == 1 and (before[shared[0]] != read_arrays(model)[shared[0]]).any()


def test_gradients_are_those_of_the_arrays_that_a_lesson_replaces_in_each_step():
    def sgd(params, lr, batch_size):
        for i, p in enumerate(params):
            params[i] = p - lr * p.grad / batch_size
            params[i].attach_grad()

    lesson = lessons.load("scratch", sgd=sgd)
    results = [train(impl, **OPTIONS, epochs=1, shares=(1, 1))[-1].train_loss for impl in (lesson, "scratch")]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
