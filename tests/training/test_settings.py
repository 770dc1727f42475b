"""Settings: schedules compared with MXNet's own schedulers, invalid values, and names from the previous version."""

import mxnet as mx
import pytest

from gluon_mgpu.commands.train import train
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import recipes
from gluon_mgpu.training.settings import OPTIONS, RENAMED, Settings, flag, takes


def rates(settings, steps_per_epoch=10):
    return [settings.learning_rate(step, steps_per_epoch) for step in range(settings.epochs * steps_per_epoch)]


def test_the_step_schedule_is_that_of_mxnets_scheduler():
    own = rates(Settings(lr=0.4, epochs=6, schedule="step", milestones=(2, 3, 5), gamma=0.5))
    # MXNet counts updates from 1, and steps after the one that it is told.
    mxnets = mx.lr_scheduler.MultiFactorScheduler(step=[20, 30, 50], factor=0.5, base_lr=0.4)
    assert own == pytest.approx([mxnets(update + 1) for update in range(60)])
    assert [own[i] for i in (19, 20, 29, 30, 50)] == pytest.approx([0.4, 0.2, 0.2, 0.1, 0.05])


@pytest.mark.parametrize("warmup_epochs", [0, 1.5])
def test_after_the_warm_up_the_cosine_schedule_is_that_of_mxnets_scheduler(warmup_epochs):
    own = rates(Settings(lr=0.4, epochs=5, schedule="cosine", warmup_epochs=warmup_epochs))
    warmup = int(warmup_epochs * 10)
    mxnets = mx.lr_scheduler.CosineScheduler(max_update=50, base_lr=0.4, warmup_steps=warmup)
    assert own[warmup:] == pytest.approx([mxnets(update) for update in range(warmup, 50)])


def test_by_default_the_rate_is_constant_after_a_linear_warm_up_and_scale_lr_changes_nothing_at_256():
    own = rates(Settings(lr=0.4, warmup_epochs=0.5))
    assert own[:5] == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.40]) and set(own[5:]) == {0.4}
    for batch_size, rate in ((64, 0.025), (256, 0.1), (512, 0.2)):
        assert Settings(batch_size=batch_size, lr=0.1, scale_lr=True).learning_rate(0, 1) == rate


WRONG = [{"dataset": "cifar"}, {"out": ""}, {"schedule": "exponential"}, {"schedule": "step"}, {"lr": float("nan")}]
WRONG += [{"lr": 1e38, "batch_size": 512, "scale_lr": True}, {"batch_size": 10**400, "scale_lr": True}]
WRONG += [{"limit": 5 * 10**9}, {"milestones": (2,)}, {"milestones": (4,), "schedule": "step"}]
WRONG += [{"shares": (1, "x")}, {"shares": "fast"}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_an_invalid_setting_is_a_usage_error_in_one_line_with_its_name(wrong):
    with pytest.raises(UsageError) as caught:
        Settings(**wrong)
    assert str(caught.value).startswith(f"{next(iter(wrong))}=") and "\n" not in str(caught.value)


@takes(Settings)
def passed(given):
    return given


def test_old_names_work_and_a_notice_says_the_new_name(capsys):
    old = {"clip_norm": 2.0, "accumulate": 3, "schedule": "step", "step_epochs": (1, 2), "step_factor": 0.5}
    new = {RENAMED.get(name, name): value for name, value in old.items()}
    assert passed(**old) == new
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == len(RENAMED) == 4
    for names in RENAMED.items():
        assert [line for line in said.err.splitlines() if all(name in line for name in names)]
    assert passed(**new) == new and capsys.readouterr().err == ""


def test_only_the_settings_that_the_caller_passed_are_given():
    assert passed("highlevel", 2, lr=0.1) == {"impl": "highlevel", "num_gpus": 2, "lr": 0.1}


@pytest.mark.parametrize(
    "args, options, name", [((), {"momentun": 0.9}, "momentum"), (("scratch",), {"impl": "x"}, "impl")]
)
def test_an_unknown_or_repeated_setting_is_a_usage_error_that_names_the_nearest_one(args, options, name):
    with pytest.raises(UsageError, match=name):
        passed(*args, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_command_line_gives_the_same_value_as_python(name):
    default = getattr(Settings(), name)
    with train.make_context("train", []) as context:
        assert context.params[name] == default
    if isinstance(default, (int, float, str)) and not isinstance(default, bool):
        with train.make_context("train", [flag(name), str(default)]) as context:
            assert context.params[name] == (str(default) if name == "num_gpus" else default)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_a_valid_run_with_an_accuracy_per_epoch_or_none(name):
    options = dict(recipes.RECIPES[name].options)
    assert options.pop("impl") == ("highlevel" if options["model"] != "lenet" else "scratch")
    assert str(options["num_gpus"]) in name
    assert len(recipes.RECIPES[name].test_accuracy) in (0, Settings(**options).epochs)
