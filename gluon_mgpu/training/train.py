"""`train` trains a lesson: `set_up` turns settings into a `Setup`, and `fit` in `loop` trains it.

This module imports mxnet only when it trains, because the number of contexts must be known before.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import platform
import secrets
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gluon_mgpu.compat import devices, startup
from gluon_mgpu.data import datasets
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, UsageError, setting
from gluon_mgpu.training import lessons, workers
from gluon_mgpu.training.config import LESSONS, Config
from gluon_mgpu.training.folder import Epoch, RunFolder, open_run

if TYPE_CHECKING:
    from mxnet import Context

    from gluon_mgpu.training.loop import Setup
    from gluon_mgpu.training.workers import Group


def train(*values: Any, **options: Any) -> list[Epoch]:
    """Train, and print the same lines as the notebook. Returns one `Epoch` per epoch.

    Arguments: the fields of `Config`. impl can also be a lesson from `lessons.load`, and dataset can be your own data:
    `datasets.own(train_images, train_labels, test_images, test_labels)`. With resume, the run continues with its
    recorded settings, except for those that are passed.
    Raises UsageError for invalid arguments, Error if a loss or a parameter is not finite, and KeyboardInterrupt on
    Ctrl-C, once the step is complete and the checkpoint is saved. With kvstore="mpi", an Error is printed, and ends all
    processes: the others would wait for this one. Start such a program with `python -m mpi4py`, so that its other
    errors do, too.
    """
    given = inspect.signature(Config).bind(*values, **options).arguments
    lesson, data = given.get("impl"), given.get("dataset")
    if isinstance(lesson, ModuleType):
        given["impl"] = lessons.name_of(lesson)
    if isinstance(data, Dataset):
        given["dataset"] = data.name
        if given.get("data_dir") is not None:
            raise UsageError("data_dir", given["data_dir"], "the data set is passed as arrays; omit this setting")
    objects = lesson if isinstance(lesson, ModuleType) else None, data if isinstance(data, Dataset) else None
    return run_training(Config.parse(given), *objects)


train.__signature__ = inspect.signature(Config).replace(return_annotation="list[Epoch]")  # type: ignore[attr-defined]


def run_training(given: dict[str, Any], lesson: ModuleType | None = None, data: Dataset | None = None) -> list[Epoch]:
    """See `train`. given: the settings that the user passed, parsed. lesson, data: passed as objects, from Python."""
    with workers.join(given.get("kvstore", Config.kvstore)) as group, open_run(given, group) as run:
        config = run.configure(given)
        if len(run.position.history) == config.epochs:
            run.end()  # if the run was killed, metrics.jsonl or curves.png may be out of date
            return run.position.history
        ctx = devices.contexts(config.gpus, config.device)  # sets up mxnet, which the following modules import
        from gluon_mgpu.data.batches import restored_afterward
        from gluon_mgpu.training.loop import fit

        gc.collect()  # networks of earlier trainings, whose blocks refer to themselves
        with restored_afterward():
            lesson = lesson or _load_lesson(config, given)
            config = lessons.for_training(config, lesson, given)
            return fit(run, set_up(run, config, lesson, data, ctx, group), group)


def set_up(
    run: RunFolder, config: Config, lesson: ModuleType, data: Dataset | None, ctx: list[Context], group: Group
) -> Setup:
    """Turn the settings of a run into what the training loop needs, and begin to write its folder.

    data: None: load the data set that is named in the settings. Raises UsageError if the settings, the devices, the
    lesson and the data do not fit together, or if a resumed run or another worker has other data.
    """
    from gluon_mgpu.data.batches import seed_generators
    from gluon_mgpu.training.loop import Setup
    from gluon_mgpu.training.model import read_arrays
    from gluon_mgpu.training.models import create_model
    from gluon_mgpu.training.state import LessonState
    from gluon_mgpu.training.step import assemble

    if draws_seed := config.seed is None:
        config = dataclasses.replace(config, seed=group.broadcast(secrets.randbelow(2**31)))
    assert config.seed is not None
    if data is None:
        data = datasets.load(config.dataset, config.data_dir, config.limit, config.seed)
    else:
        data = data.first(config.limit)
    config.check_batch_size(len(data.train_labels), group.size * len(ctx))
    details = _details(ctx, data, group)
    _check_data(details["data_checksum"], run, config, group)
    warning = _compare_with_one_device(lesson, ctx, config, data)
    seed_generators(config.seed)
    model = create_model(lesson, ctx, config, data.image_shape, data.classes, exactly=data.name != "own")
    saved = run.restore(model)
    state = LessonState(model, group) if callable(getattr(lesson, "state", None)) else None
    if saved and not state:
        name = lessons.name_of(lesson)
        raise Error(f"{run.folder}: the run's lesson has a state, but {name} has none; resume with the run's lesson")
    if state and run.recorded:
        state.load(saved, run.folder)
    if group.size > 1:
        model.load(group.broadcast_arrays(read_arrays(model)))
    is_assembled = group.size > 1 or config.shares is not None
    if draws_seed:
        log.say(f"drew a seed; pass {setting('seed', config.seed)} to repeat this run")
    _say_what_is_not_called(lesson, config, is_assembled)
    run.begin(config, {**details, "running_stats": bool(model.running_stats)})
    if run.recorded is not None:
        of_lesson = state.read() if state else {}
        run.save({**read_arrays(model), **of_lesson})  # so that the next resume uses the new settings
    devices.say_if_no_gpu(ctx, config.device)
    return Setup(config, data, model, assemble(model, group) if is_assembled else model.step, state, warning)


def _load_lesson(config: Config, given: dict[str, Any]) -> ModuleType:
    if "impl" not in given and config.impl not in LESSONS:  # a checkpoint does not choose code to run
        advice = f"the run used your own lesson, {config.impl}; pass it with {setting('impl')}"
        raise UsageError("resume", config.resume, advice)
    return lessons.load(config.impl)


def _details(ctx: list[Context], data: Dataset, group: Group) -> dict[str, Any]:
    """What a run records besides its settings."""
    import mxnet

    return {
        "workers": group.size,
        "devices": [str(c) for c in ctx],
        "threads": startup.openmp_threads(),
        "mxnet": mxnet.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "data": data.source,
        "data_checksum": data.checksum(),
        "image_shape": data.image_shape,
        "image_dtype": str(data.train_images.dtype),
        "classes": data.classes,
    }


def _check_data(checksum: str, run: RunFolder, config: Config, group: Group) -> None:
    """Raise UsageError if a resumed run or another worker has other data."""
    if run.details.get("data_checksum", checksum) != checksum:
        advice = f"not the data that the run in {config.resume} was trained on"
        raise UsageError("data_dir", config.data_dir, advice)
    group.agree({"data with checksum": checksum}, "start all workers with the same data")


def _compare_with_one_device(lesson: ModuleType, ctx: list[Context], config: Config, data: Dataset) -> str:
    """Compare your own lesson's step with one device. Returns a line to repeat at the end if they differ."""
    if len(ctx) == 1 or not lessons.is_own(lesson):
        return ""
    from gluon_mgpu.check.mxnet import compare_lesson

    report = compare_lesson(lesson, ctx, config, data.image_shape, data.classes, own_trainer=False)
    name = lessons.name_of(lesson)
    if report.verdict:
        without = f" (compared without {setting('shares')})" if config.shares else ""
        log.say(f"{name} {report.line}{without}")
    return report.verdict and f"{name} {report.verdict}"


def _say_what_is_not_called(lesson: ModuleType, config: Config, is_assembled: bool) -> None:
    """Print a notice that names the functions of a user's own lesson that are not called with these settings."""
    if not lessons.is_own(lesson):
        return
    names = ["split_and_load"] * bool(config.shares) + ["lenet"] * (config.model != "lenet")
    names += ["train_batch"] * is_assembled + ["train"] * lessons.has_own("train", lesson)
    if names:
        log.say(f"training does not call your own {', '.join(names)} in {lessons.name_of(lesson)}, with these settings")
