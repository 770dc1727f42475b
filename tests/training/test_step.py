"""What a step can do beyond the notebooks' step: 20 steps of each feature, compared with NumPy in float64.

The network is softmax regression, whose gradient has a formula. It has no ReLU, so float32 and float64 results differ
only by rounding. A registered network with batch normalization and a frozen array has what softmax regression lacks.
"""

import mxnet as mx
import numpy as np
import pytest
import reference
import small_networks
from mxnet import nd
from small_networks import softmax_regression

from gluon_mgpu import evaluate, highlevel, scratch, train
from gluon_mgpu.training import lessons, models, registry
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import read_arrays
from gluon_mgpu.training.record import read
from gluon_mgpu.training.step import assemble
from gluon_mgpu.training.workers import Group

LR, STEPS = 0.05, 20
EXTRAS = {
    "none": {},
    "shares": {"shares": (5, 2, 1)},
    "all": {"momentum": 0.5, "weight_decay": 0.01, "shares": (1, 3, 2)},
}


def batches(sizes):
    rng = np.random.default_rng(3)
    return [(nd.array(rng.random((n, 1, 28, 28))), nd.array(rng.integers(0, 10, n))) for n in sizes]


SIZES = [48, 31, 3, 50] * (STEPS // 4)  # 3: one example per device
START = {"p0": 0.1 * np.random.default_rng(1).standard_normal((10, 784), np.float32), "p1": np.zeros(10, np.float32)}


def build(module, devices, **settings):
    """(model, step)"""
    settings = {"batch_size": 50, **settings}
    if "shares" in settings:
        settings["shares"] = settings["shares"][:devices] if devices > 1 else None
    if module is scratch:
        params = [nd.array(p) for p in START.values()]
        lesson = lessons.load("scratch", lenet=softmax_regression, init_params=lambda: params)
        config = Config(**settings)
    else:
        lesson, config = highlevel, Config(impl="highlevel", model="softmax_regression", **settings)
    model = models.create_model(lesson, [mx.cpu(i) for i in range(devices)], config)
    zeros = {name: np.zeros(array.shape, np.float32) for name, array in model.arrays().items()}
    model.load({**zeros, **START})
    return model, assemble(model, Group())


def numpy_steps(momentum=0.0, weight_decay=0.0, **_):
    """({name: parameter}, {name: velocity}, [losses of each step], {name: sum of |update|}) in float64."""
    params = {name: p.astype(np.float64) for name, p in START.items()}
    velocities = {name: np.zeros_like(p) for name, p in params.items()}
    moved = {name: np.zeros_like(p) for name, p in params.items()}
    losses = []
    for X, y in batches(SIZES):
        X, y = X.asnumpy().astype(np.float64), y.asnumpy().astype(int)
        of_step, sums = reference.losses_and_gradients([*params.values()], X, y)
        losses.append(of_step)
        grads = {name: total / len(y) for name, total in zip(params, sums)}
        for name, p in params.items():
            velocities[name] = momentum * velocities[name] - LR * (grads[name] + weight_decay * p)
            p += velocities[name]
            moved[name] += np.abs(velocities[name])
    return params, velocities, losses, moved


@pytest.mark.parametrize(
    "module, settings", [(scratch, "none"), (scratch, "shares"), *((highlevel, s) for s in EXTRAS)]
)
@pytest.mark.parametrize("devices", [1, 3])
def test_20_steps_follow_the_update_rule_in_float64_and_keep_replicas_equal(module, devices, settings):
    settings = EXTRAS[settings]
    params, velocities, losses, moved = numpy_steps(**settings)
    model, step = build(module, devices, **settings)
    eps = float(np.finfo(np.float32).eps)
    for (X, y), expected in zip(batches(SIZES), losses):
        found = np.concatenate([shard.asnumpy() for shard in step(X, y, LR)])
        # A score is a sum of 784 products, computed from parameters with the errors of up to 20 updates.
        atol = 2 * (784 + STEPS) * eps * found.max()
        np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=0, atol=atol)
    # An update sums a batch's gradient, whose terms come from scores (sums of 784 products); 20 updates add up.
    additions = 784 + max(SIZES) + STEPS
    found = read_arrays(model)
    for name in START:
        atol = additions * eps * (moved[name].max() + np.abs(params[name]).max())
        np.testing.assert_allclose(found[name], params[name], rtol=0, atol=atol)
        assert atol < 0.02 * np.abs(params[name] - START[name]).max()  # so a wrong rule would be seen
        if "momentum" in settings:
            atol = additions * eps * moved[name].max()
            np.testing.assert_allclose(found[f"velocity/{name}"], velocities[name], rtol=0, atol=atol)
    assert len(found) == len(START) * (1 + ("momentum" in settings))
    np.testing.assert_equal([read_arrays(model, device) for device in range(devices)], [found] * devices)


registry.register("other names", small_networks.normalized, mx.init.Xavier(), names="abcdefghijkl")


def normalized(devices, seed=0, model="normalized", **settings):
    mx.random.seed(seed)
    ctx = [mx.cpu(i) for i in range(devices)]
    return models.create_model("highlevel", ctx, Config(impl="highlevel", model=model, **settings))


@pytest.mark.parametrize("model, hybridize", [("normalized", True), ("normalized", False), ("other names", True)])
def test_replicas_with_batch_normalization_stay_equal(model, hybridize):
    model = normalized(2, model=model, shares=(3, 1), hybridize=hybridize)
    step = assemble(model, Group())
    for X, y in batches([8, 5, 2, 8]):
        step(X, y, 0.1)
    np.testing.assert_equal(read_arrays(model, 1), read_arrays(model, 0))


def test_every_array_is_saved_and_all_but_the_frozen_one_are_trained(tmp_path):
    options = {"model": "normalized", "dataset": "synthetic", "limit": 900, "seed": 1, "device": "cpu", "epochs": 1}
    train("highlevel", 2, 50, 0.05, **options, momentum=0.9, out=tmp_path / "run")
    run = tmp_path / "run"
    trained = read_arrays(evaluate.load(run, gpus=2, device="cpu").model)
    initial = read_arrays(normalized(2, seed=1))
    # Weights of three layers and one bias; two times gamma, beta, mean and variance.
    assert len(trained) == 3 + 1 + 2 * 4 and trained.keys() == initial.keys()
    assert [name for name, array in initial.items() if np.array_equal(array, trained[name])] == ["5.gamma"]
    velocities = [name for name in read(run).arrays if name.startswith("velocity/")]
    assert len(velocities) == len(trained) - 5  # none for the frozen array, the means and the variances
