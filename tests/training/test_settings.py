"""Schedules and shares, against MXNet's own schedulers and by arithmetic."""

import mxnet as mx
import numpy as np
import pytest

from gluon_mgpu import highlevel
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import recipes
from gluon_mgpu.training.settings import MODELS, Settings, shard_sizes


def rates(settings, steps_an_epoch=10):
    return [settings.learning_rate(step, steps_an_epoch) for step in range(settings.epochs * steps_an_epoch)]


def test_the_learning_rate_is_constant_unless_asked_otherwise():
    assert rates(Settings(lr=0.3)) == 40 * [0.3]


def test_the_step_schedule_is_that_of_mxnets_scheduler():
    ours = rates(Settings(lr=0.4, epochs=6, schedule="step", step_epochs=(2, 3, 5), step_factor=0.5))
    # MXNet counts updates from 1, and steps after the one it is told.
    theirs = mx.lr_scheduler.MultiFactorScheduler(step=[20, 30, 50], factor=0.5, base_lr=0.4)
    assert ours == pytest.approx([theirs(update + 1) for update in range(60)])
    assert [ours[i] for i in (19, 20, 29, 30, 50)] == pytest.approx([0.4, 0.2, 0.2, 0.1, 0.05])


@pytest.mark.parametrize("warmup_epochs", [0, 1.5])
def test_the_cosine_schedule_is_that_of_mxnets_scheduler_once_warm(warmup_epochs):
    ours = rates(Settings(lr=0.4, epochs=5, schedule="cosine", warmup_epochs=warmup_epochs))
    warm = int(warmup_epochs * 10)
    theirs = mx.lr_scheduler.CosineScheduler(max_update=50, base_lr=0.4, warmup_steps=warm)
    assert ours[warm:] == pytest.approx([theirs(update) for update in range(warm, 50)])


def test_warm_up_grows_linearly_to_the_learning_rate_and_no_step_is_without_one():
    ours = rates(Settings(lr=0.4, warmup_epochs=0.5))
    np.testing.assert_allclose(ours[:5], [0.08, 0.16, 0.24, 0.32, 0.40])
    assert set(ours[5:]) == {0.4}


def test_scale_lr_is_linear_in_the_batch_and_changes_nothing_at_256():
    assert [Settings(n, 0.1, scale_lr=True).learning_rate(0, 1) for n in (64, 256, 512)] == [0.025, 0.1, 0.2]


@pytest.mark.parametrize("examples", [0, 1, 3, 7, 96, 256, 511])
@pytest.mark.parametrize("shares", [None, (1, 1, 1, 1), (80, 20, 1, 3), (0.001, 1, 1, 1000)])
def test_shards_hold_every_example_once_in_proportion_and_none_is_empty_before_all_are(examples, shares):
    sizes = shard_sizes(examples, 4, shares)
    assert sum(sizes) == examples and min(sizes) >= 0
    assert [size > 0 for size in sizes] == [i < examples for i in range(4)]
    if examples > 4:
        exact = examples * np.array(shares or (1, 1, 1, 1)) / sum(shares or (1, 1, 1, 1))
        assert (np.abs(sizes - exact) < 1.0 + 4 * (exact < 1).any()).all()


def test_80_20_of_100_examples_are_80_and_20():
    assert shard_sizes(100, 2, (80, 20)) == [80, 20]
    assert shard_sizes(96, 2, (80, 20)) == [77, 19]  # 76.8 and 19.2


def test_shares_that_nobody_has_measured_divide_no_batch():
    with pytest.raises(UsageError, match="^shares auto: train alone measures them; give a number a device"):
        shard_sizes(100, 2, Settings(shares="auto").shares)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "alexnet"},
        {"dataset": "cifar"},
        {"schedule": "exponential"},
        {"epochs": 2.5},
        {"lr": "0.2"},
        {"scale_lr": 1},
        {"step_epochs": (2,)},
        {"step_epochs": (2.5,), "schedule": "step"},
        {"shares": (1, "x")},
        {"lr": 1e38, "batch_size": 512, "scale_lr": True},
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_refused_by_name_in_one_line(wrong):
    with pytest.raises(UsageError) as caught:
        Settings(**wrong)
    assert next(iter(wrong)) in str(caught.value) and "\n" not in str(caught.value)


def test_from_python_settings_are_named_as_they_are_given():
    with pytest.raises(UsageError, match="^weight_decay -1: give 0 to below 1"):
        Settings(weight_decay=-1)
    with pytest.raises(UsageError, match="^schedule step: give step_epochs too, such as 2,3$"):
        Settings(schedule="step")
    with pytest.raises(UsageError, match="^step_epochs 2,3: give schedule step too"):
        Settings(step_epochs=(2, 3))


def test_the_models_that_can_be_chosen_are_those_that_highlevel_builds():
    assert list(highlevel.MODELS) == MODELS


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_is_a_run_that_can_be_and_has_an_accuracy_for_each_epoch_or_none(name):
    options = dict(recipes.RECIPES[name].options)
    assert options.pop("impl") == ("highlevel" if options["model"] != "lenet" else "scratch")
    assert options.pop("gpus") in name
    settings = Settings(**options)
    assert len(recipes.RECIPES[name].test_accuracy) in (0, settings.epochs)
