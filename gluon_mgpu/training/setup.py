"""Sets up a run: turns settings, a lesson and a recorded run into a `Setup`, which `fit` trains."""

from __future__ import annotations

import platform
from typing import Any

import mxnet
import numpy as np
from mxnet import Context

from gluon_mgpu import __version__
from gluon_mgpu.check.mxnet import compare_lesson
from gluon_mgpu.compat import startup
from gluon_mgpu.data import datasets
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, UsageError, setting, shown
from gluon_mgpu.training.checkpoint import STATE
from gluon_mgpu.training.config import SETTINGS, Config
from gluon_mgpu.training.lessons import Lesson
from gluon_mgpu.training.loop import Setup
from gluon_mgpu.training.models import MODELS, Model, read_arrays
from gluon_mgpu.training.record import CHANGEABLE, Position, Run
from gluon_mgpu.training.seeds import seed_generators
from gluon_mgpu.training.state import LessonState
from gluon_mgpu.training.step import Step, assemble
from gluon_mgpu.training.watch import naming_what_is_not_saved, naming_what_it_does_not_call
from gluon_mgpu.training.workers import Group


def set_up(
    config: Config, recorded: Run | None, lesson: Lesson, data: Dataset | None, ctx: list[Context], group: Group
) -> Setup:
    """Turn the settings of a run into what the training loop needs. Says what a resumed run does differently.

    recorded: the run to resume; None: a new run. data: None: load the data set that is named in the settings. Raises
    UsageError if the settings, the devices, the lesson and the data do not fit together, or if a resumed run or another
    worker has other data.
    """
    if data is None:
        data = datasets.load(config.dataset, config.data_dir, config.limit, config.seed)
    else:
        data = data.first(config.limit)
    details = _details(ctx, data, group)
    _check_data(data, details["data_digest"], recorded, config, ctx, group)
    warning = _compare_with_one_device(lesson, ctx, config, data)
    assert config.seed is not None
    seed_generators(config.seed)
    model = MODELS[lesson.family](lesson, ctx, config, details["image_shape"])
    model.check_scores(details["classes"], exactly=data.name != "own")
    state = LessonState(lesson, len(ctx), group) if callable(getattr(lesson.module, "state", None)) else None
    if recorded:
        _restore(model, state, recorded, config, lesson)
    if group.size > 1:
        model.load(group.broadcast_arrays(read_arrays(model)))
    details["running_stats"] = bool(model.running_stats)
    run = Run(config, details, recorded.position if recorded else Position(), {})
    if recorded:
        _say_what_changed(recorded, run)
    step = _step(model, lesson, state, group, names_calls=not warning)
    return Setup(run, data, model, step, group, state, warning)


def _check_data(
    data: Dataset, digest: str, recorded: Run | None, config: Config, ctx: list[Context], group: Group
) -> None:
    """Raise UsageError if a step would have too few examples, or if the recorded run or a worker has other data."""
    config.check_batch_size(len(data.train_labels), group.size * len(ctx))
    if recorded:
        recorded.check_data(data, digest, config.data_dir)
    if group.size > 1:
        group.agree({"the digest of the data": digest[:8]}, "start all workers with the same data")


def _step(model: Model, lesson: Lesson, state: LessonState | None, group: Group, names_calls: bool) -> Step:
    """The function that takes a step. For your own lesson, its first calls name what may be a mistake.

    names_calls: also name the functions that a step does not call.
    """
    config = model.config
    step = assemble(model, group) if group.size > 1 or config.shares else model.step
    if lesson.is_own and names_calls:
        built = ["lenet"] if lesson.family == "highlevel" and config.model == "lenet" else []
        step = naming_what_it_does_not_call(step, lesson, built)
    if lesson.is_own and (config.out or config.resume):
        step = naming_what_is_not_saved(step, lesson, state.local if state else dict)
    return step


def _details(ctx: list[Context], data: Dataset, group: Group) -> dict[str, Any]:
    """What a run records besides its settings."""
    return {
        "workers": group.size,
        "devices": [str(c) for c in ctx],
        "threads": startup.openmp_threads(),
        "version": __version__,
        "mxnet": mxnet.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        **data.described(),
    }


def _compare_with_one_device(lesson: Lesson, ctx: list[Context], config: Config, data: Dataset) -> str:
    """Compare your own lesson's step with one device. Returns a line to repeat at the end if they differ."""
    if len(ctx) == 1 or not lesson.is_own:
        return ""
    report = compare_lesson(lesson.module, ctx, config, data.image_shape, data.classes, own_trainer=False)
    if report.verdict:
        without = f" (compared without {setting('shares')})" if config.shares else ""
        log.say(f"{lesson.name} {report.line}{without}")
    return report.verdict and f"{lesson.name} {report.verdict}"


def _restore(model: Model, state: LessonState | None, recorded: Run, config: Config, lesson: Lesson) -> None:
    """Give the model and the lesson the arrays of a recorded run; only worker 0 has them. Raises Error if they do not
    match the network or the lesson's state."""
    of_lesson = {name: array for name, array in recorded.arrays.items() if name.startswith(STATE)}
    of_model = {name: array for name, array in recorded.arrays.items() if name not in of_lesson}
    try:
        if of_lesson and not state:
            advice = f"{lesson.name} has none; resume with the run's lesson"
            raise Error(f"the run's lesson has a state, but {advice}")
        if of_model:
            model.load(of_model)
        if state:
            state.load(of_lesson)
    except UsageError:
        raise
    except Error as error:
        raise Error(f"{config.resume}: {error}") from None


def _say_what_changed(recorded: Run, run: Run) -> None:
    """Print a notice if something that may change has changed in a resumed run."""
    old, new = recorded.described(), run.described()
    names = [name for name in sorted(SETTINGS) if SETTINGS[name].changeable and name != "epochs"]
    changed = [name for name in (*names, *CHANGEABLE) if name in old and old[name] != new.get(name, old[name])]
    if changed:
        effect = "results are the same except for rounding, and for random numbers in a step"
        if "impl" in changed:
            effect = "the other lesson continues the run"
        elif new["running_stats"] and {"devices", "shares", "workers"} & {*changed}:
            effect = "results differ, because batch normalization sees only the examples of one shard"
        changes = [f"{name} {shown(new[name])} instead of {shown(old[name])}" for name in changed]
        log.say(f"{', '.join(changes)}: {effect}")
