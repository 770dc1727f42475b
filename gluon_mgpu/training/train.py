"""`train` trains a lesson: it opens the folder of a run, `set_up` in `setup` prepares the run, and `fit` in `loop`
trains it.

This module imports mxnet only when it trains, because the number of contexts must be known before.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gluon_mgpu import __version__
from gluon_mgpu.compat import devices
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, UsageError, setting
from gluon_mgpu.training import lessons, workers
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.folder import Folder, opened
from gluon_mgpu.training.record import Epoch, Run


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
    lesson = data = None
    if isinstance(given.get("impl"), ModuleType):
        lesson = given["impl"]
        given["impl"] = lessons.name_of(lesson)
    if isinstance(given.get("dataset"), Dataset):
        data = given["dataset"].checked()
        given["dataset"] = data.name
        if given.get("data_dir") is not None:
            raise UsageError("data_dir", given["data_dir"], "the data set is passed as arrays; omit this setting")
    return run_training(Config.parse(given), lesson, data)


train.__signature__ = inspect.signature(Config).replace(return_annotation="list[Epoch]")  # type: ignore[attr-defined]


def run_training(given: dict[str, Any], lesson: ModuleType | None = None, data: Dataset | None = None) -> list[Epoch]:
    """See `train`. given: the settings that the user passed, parsed. lesson, data: passed as objects, from Python."""
    with workers.join(given.get("kvstore", Config.kvstore)) as group:
        if group.size > 1:
            texts = {setting(name): str(value) for name, value in given.items()}
            group.agree({"version": __version__, **texts}, "start all workers with the same options and version")
        given = Config.with_absolute_paths(given)
        with opened(given, group) as (folder, recorded):
            draws_seed = recorded is None and given.get("seed") is None
            if draws_seed:
                given = {**given, "seed": group.broadcast(secrets.randbelow(2**31))}
            config = _resumed(recorded, given, folder) if recorded else Config(**given)
            if recorded and len(recorded.position.history) == config.epochs:
                return recorded.position.history
            ctx = devices.contexts(config.gpus, config.device)  # sets up mxnet, which the following modules import
            from gluon_mgpu.training import loop, seeds, setup

            gc.collect()  # networks of earlier trainings, whose blocks refer to themselves
            with seeds.restored_afterward(), _exit_is_an_error(config.impl):
                chosen, config = lessons.chosen(config, given, lesson)
                ready = setup.set_up(config, recorded, chosen, data, ctx, group)
                if draws_seed:
                    log.say(f"drew a seed; pass {setting('seed', config.seed)} to repeat this run")
                if folder:
                    folder.create()
                if recorded:  # so that the next resume uses the new settings
                    started = ready.now()
                    if folder:
                        folder.write(started)
                devices.say_if_no_gpu(ctx, config.device)
                return loop.fit(ready, folder)


@contextmanager
def _exit_is_an_error(impl: str) -> Iterator[None]:
    try:
        yield
    except SystemExit as ended:  # status 0 would say that it was trained
        advice = "remove this call, or put it under `if __name__ == '__main__':`"
        raise Error(f"{impl} ended the program with sys.exit({ended.code}); {advice}") from None


def _resumed(recorded: Run, given: dict[str, Any], folder: Folder | None) -> Config:
    """The settings of a resumed run. Says that it is resumed, and updates the folder of a finished run."""
    config, done = recorded.config.resumed(given), len(recorded.position.history)
    if config.epochs < done:
        raise UsageError("epochs", config.epochs, f"must be at least {done}, the number of finished epochs")
    before = recorded.config.epochs
    instead = f"; epochs: {config.epochs} instead of {before}" if config.epochs != before else ""
    log.say(f"resuming {config.resume} after {recorded.position}{instead}")
    if config.epochs == done:
        longer = f"; pass {setting('epochs', done + 1)} or more to train longer"
        log.say(f"all epochs are finished{'' if config.schedule == 'cosine' else longer}")
        finished = recorded._replace(config=dataclasses.replace(recorded.config, epochs=done))
        if folder and config.epochs != before:  # nothing else changes a finished run
            folder.write(finished)
        if folder:
            folder.end(finished)  # if the run was killed, metrics.jsonl or curves.png may be out of date
    return config
