"""`train` trains a lesson: the path of a command, from its options to the training loop.

This module imports mxnet only when `train` is called, because the number of contexts must be known before.
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
from gluon_mgpu.support.errors import UsageError, setting
from gluon_mgpu.training import workers
from gluon_mgpu.training.config import LESSONS, SETTINGS, Config
from gluon_mgpu.training.folder import Epoch, RunFolder, open_run, read_state
from gluon_mgpu.training.lessons import for_training, load, name_of, original

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
    processes: the others would wait for this one.
    """
    given = inspect.signature(Config).bind(*values, **options).arguments
    lesson, data = given.get("impl"), given.get("dataset")
    if isinstance(lesson, ModuleType):
        given["impl"] = name_of(lesson)
    if isinstance(data, Dataset):
        given["dataset"] = data.name
        if given.get("data_dir") is not None:
            raise UsageError("data_dir", given["data_dir"], "the data set is passed as arrays; omit this setting")
    given = Config.convert(given)
    with workers.join(given.get("kvstore", "local")) as group, open_run(given, group) as run:
        config = run.configure(given)
        if len(run.position.history) == config.epochs:
            run.end()  # if the run was killed, metrics.jsonl or curves.png may be out of date
            return run.position.history
        ctx = devices.contexts(config.gpus, config.device)  # sets up mxnet, which the following modules import
        from gluon_mgpu.data.generators import restored_afterward
        from gluon_mgpu.training.loop import fit

        gc.collect()  # networks of earlier trainings, whose blocks refer to themselves
        with restored_afterward():
            setup = prepare(run, config, given, lesson, data, ctx, group)
            return fit(run, setup, group)


train.__signature__ = inspect.signature(Config).replace(return_annotation="list[Epoch]")  # type: ignore[attr-defined]


def prepare(
    run: RunFolder, config: Config, given: dict[str, Any], lesson: Any, data: Any, ctx: list[Context], group: Group
) -> Setup:
    """Turn the settings of a run into what the training loop needs, and begin to write its folder.

    given: the settings that the user passed. lesson: a module, or else the one in config is loaded. data: a Dataset, or
    else the one in config is loaded. Raises UsageError if the settings, the devices, the lesson and the data do not fit
    together, or if a resumed run or another worker has other data.
    """
    from gluon_mgpu.data.generators import seed_generators
    from gluon_mgpu.training.loop import Setup
    from gluon_mgpu.training.model import read_arrays
    from gluon_mgpu.training.models import create_model
    from gluon_mgpu.training.step import extended

    if not isinstance(lesson, ModuleType):
        if "impl" not in given and config.impl not in LESSONS:  # a checkpoint does not choose code to run
            advice = f"the run used your own lesson, {config.impl}; pass it with {setting('impl')}"
            raise UsageError("resume", config.resume, advice)
        lesson = load(config.impl)
    config = for_training(config, lesson, given)
    if config.seed is None:
        config = dataclasses.replace(config, seed=group.broadcast(secrets.randbelow(2**31)))
    if isinstance(data, Dataset):
        data = data.first(config.limit)
    else:
        data = datasets.load(config.dataset, config.data_dir, config.limit, config.seed)
    config.check_batch_size(len(data.train_labels), group.size * len(ctx))
    details = _details(ctx, data, group)
    if run.details.get("data_checksum", details["data_checksum"]) != details["data_checksum"]:
        advice = f"not the data that the run in {config.resume} was trained on"
        raise UsageError("data_dir", config.data_dir, advice)
    group.agree({"data with checksum": details["data_checksum"]})
    warning = _compare_with_one_device(lesson, ctx, config, data)
    assert config.seed is not None
    seed_generators(config.seed)
    model = create_model(lesson, ctx, config, data.image_shape, data.classes, exactly=data.name != "own")
    if run.recorded is None and given.get("seed") is None:
        log.say(f"drew a seed; pass {setting('seed', config.seed)} to repeat this run")
    is_extended = group.size > 1 or config.needs_extended_step(original(lesson))
    _say_what_is_not_called(lesson, config, is_extended)
    run.load(model, group)
    if group.size > 1:
        model.load(group.broadcast_arrays(read_arrays(model)))
    arrays = {**read_arrays(model), **read_state(model, group)}
    run.begin(config, {**details, "running_stats": bool(model.running_stats)}, arrays)
    devices.say_if_no_gpu(ctx, config.device)
    return Setup(config, data, model, extended(model, group) if is_extended else model.step, warning)


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
        "image_range": data.image_range,
        "classes": data.classes,
    }


def _compare_with_one_device(lesson: ModuleType, ctx: list[Context], config: Config, data: Dataset) -> str:
    """Compare your own lesson's step with one device. Returns a line to repeat at the end if they differ."""
    if not (config.check or (len(ctx) > 1 and name_of(lesson) not in LESSONS)):
        return ""
    from gluon_mgpu.check.mxnet import compare

    report = compare(lesson, ctx, config, data.image_shape, data.classes)
    if report.verdict or config.check:
        omitted = config.changed(name for name in SETTINGS if SETTINGS[name].extended)
        without = f" (compared without {', '.join(map(setting, omitted))})" if omitted else ""
        log.say(f"{name_of(lesson)} {report.line}{without}")
    return report.verdict and f"{name_of(lesson)} {report.verdict}"


def _say_what_is_not_called(lesson: ModuleType, config: Config, is_extended: bool) -> None:
    """Print a notice that names the functions of a user's own lesson that a step does not call with these settings."""
    names = []
    if name_of(lesson) in LESSONS:
        return
    if config.shares:
        names.append("split_and_load")
    if original(lesson) == "scratch" and (config.momentum or config.weight_decay):
        names.append("sgd")
    if config.model != "lenet":
        names.append("lenet")
    if is_extended:
        names.append("train_batch")
    if names:
        log.say(f"with these settings, a step does not call your own {', '.join(names)} in {name_of(lesson)}")
