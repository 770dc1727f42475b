"""`train` trains a lesson: the path of a command, from its options to the training loop.

This module imports mxnet only when `train` is called, because the number of contexts must be known before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from gluon_mgpu.compat import devices, startup
from gluon_mgpu.data import datasets
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.runtime import log
from gluon_mgpu.runtime.errors import UsageError, setting
from gluon_mgpu.training import workers
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.lessons import LESSONS, for_training, load, name_of
from gluon_mgpu.training.run import Epoch, open_run

if TYPE_CHECKING:
    from typing import ParamSpec

    from mxnet import Context

    from gluon_mgpu.training.model import Model
    from gluon_mgpu.training.run import Run
    from gluon_mgpu.training.workers import Group

    P = ParamSpec("P")
T = TypeVar("T")


def takes(config: Callable[P, Config]) -> Callable[[Callable[[dict[str, Any]], T]], Callable[P, T]]:
    """Let callers of a function pass settings as arguments. The function gets them as a dict without those that the
    caller omitted, because a resumed run keeps its own values of these."""

    def decorate(function: Callable[[dict[str, Any]], T]) -> Callable[P, T]:
        signature = inspect.signature(config)

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            return function(dict(signature.bind(*args, **options).arguments))

        returns = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        return call

    return decorate


@takes(Config)
def train(options: dict[str, Any]) -> list[Epoch]:
    """Train, and print the same lines as the notebook. Returns one `Epoch` per epoch.

    Arguments: the fields of `Config`. impl can also be a lesson from `lessons.load`, and dataset can be your own data:
    `datasets.own(train_images, train_labels, test_images, test_labels)`. With resume, the run continues with its
    recorded settings, except for those that are passed.
    Raises UsageError for invalid arguments, Error if a loss or a parameter is not finite, and KeyboardInterrupt on
    Ctrl-C, once the step is complete and the checkpoint is saved.
    """
    lesson, data = options.get("impl"), options.get("dataset")
    if isinstance(lesson, ModuleType):
        options["impl"] = name_of(lesson)
    if isinstance(data, Dataset):
        options["dataset"] = data.name
        if options.get("data_dir") is not None:
            raise UsageError("data_dir", options["data_dir"], "the data set is passed as arrays; omit this setting")
    options = Config.convert(options)
    with workers.join(options.get("kvstore", "local")) as group, open_run(options, group) as run:
        config = run.config
        if len(run.position.history) == config.epochs:
            run.end()  # if the run was killed, metrics.jsonl or curves.png may be out of date
            return run.position.history
        ctx = devices.contexts(config.gpus, config.device)
        if not isinstance(lesson, ModuleType):
            if "impl" not in options and config.impl not in LESSONS:  # a checkpoint does not choose code to run
                advice = f"the run used your own lesson, {config.impl}; pass it with {setting('impl')}"
                raise UsageError("resume", config.resume, advice)
            lesson = load(config.impl)
        run.config = config = for_training(config, lesson, options)
        if isinstance(data, Dataset):
            data = data.first(config.limit)
        else:
            data = datasets.load(config.dataset, config.data_dir, config.limit, config.seed)
        config.check_batch_size(len(data.train_labels), group.size * len(ctx))
        _check_checksum(run, data, group)
        from gluon_mgpu.training import (
            loop,
            models,  # imports mxnet, which `devices.contexts` has set up
            step,
        )
        from gluon_mgpu.training.model import state_dict

        doubt = _doubt(lesson, ctx, config, data)
        model = models.create(lesson, ctx, run, data, group)
        if options.get("seed") is None and not config.resume:
            log.say(f"drew a seed; pass {setting('seed', config.seed)} to repeat this run")
        run.begin(_facts(model, data, group), state_dict(model))
        devices.say_if_no_gpu(ctx, config.device)
        plain = step.is_plain(config, model.extensions, group)
        history = loop.fit(run, model, model.step if plain else step.extended(model, group), data, group)
        if doubt:
            log.say(f"remember: {doubt}")
        return history


def _doubt(lesson: ModuleType, ctx: list[Context], config: Config, data: Dataset) -> str:
    """Compare your own lesson's step with one device. Returns a line to repeat at the end if they differ."""
    if not (config.check or (len(ctx) > 1 and name_of(lesson) not in LESSONS)):
        return ""
    from gluon_mgpu.training import check, models, step

    report = check.compare(lesson, ctx, config, data.image_shape, data.classes)
    if report.verdict or config.check:
        omitted = config.changed((*models.ArrayModel.extensions, *step.EXTENSIONS))
        without = f" (compared without {', '.join(map(setting, omitted))})" if omitted else ""
        log.say(f"{name_of(lesson)} {report.line}{without}")
    return report.verdict and f"{name_of(lesson)} {report.verdict}"


def _check_checksum(run: Run, data: Dataset, group: Group) -> None:
    """Raise UsageError if a resumed run, or another worker, has other data."""
    checksum = data.checksum()
    if run.facts.get("data_checksum", checksum) != checksum:
        advice = f"not the data that the run in {run.config.resume} was trained on"
        raise UsageError("data_dir", run.config.data_dir, advice)
    group.agree({"data with checksum": checksum})


def _facts(model: Model, data: Dataset, group: Group) -> dict[str, Any]:
    """What a run records besides its settings."""
    return {
        "workers": group.size,
        "devices": [str(c) for c in model.ctx],
        "threads": startup.openmp_threads(),
        "data": data.source,
        "data_checksum": data.checksum(),
        "image_shape": model.image_shape,
        "image_dtype": str(data.train_images.dtype),
        "image_range": data.image_range,
        "classes": data.classes,
        "running_stats": bool(model.running_stats),
    }
