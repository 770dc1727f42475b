"""Finds the gluon.Trainer that a lesson's own `train` creates."""

from __future__ import annotations

import inspect
import io
from contextlib import ExitStack, redirect_stdout
from typing import Any, NoReturn
from unittest.mock import patch

from mxnet import gluon, nd

from gluon_mgpu.check.processes import where
from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets
from gluon_mgpu.support.errors import Error
from gluon_mgpu.training.models import GluonModel

NAMES = ("train", "run")  # the latter is the notebook's


class _FirstStep(BaseException):
    """Ends `train` at its first step. trainer: what it passes."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer


def own_trainer(model: GluonModel, lr: float, batch: tuple[nd.NDArray, nd.NDArray]) -> gluon.Trainer:
    """The Trainer with which the lesson's `train` takes its first step, for a model's network and devices. The function
    runs until then, with the network of the model, and gets this batch as its data.

    Raises Error if there is none.
    """
    lesson, k = model.lesson, len(model.ctx)
    function = next((getattr(lesson, name) for name in NAMES if callable(getattr(lesson, name, None))), None)
    if function is None:
        raise Error(f"the file has no function {' or '.join(NAMES)}")
    of_step = inspect.signature(lesson.train_batch)
    known: dict[str, Any] = {"num_gpus": k, "batch_size": len(batch[0]), "lr": lr, "ctx": model.ctx}
    known |= {"learning_rate": lr, "epochs": 1, "num_epochs": 1, "seed": 0}

    def first_step(*args: Any, **options: Any) -> NoReturn:
        raise _FirstStep([*of_step.bind(*args, **options).arguments.values()][4])

    try:
        arguments = {name: known[name] for name in inspect.signature(function).parameters if name in known}
        with ExitStack() as stack:
            for owner, name, replacement in (
                (lesson, "train_batch", first_step),
                (lesson, "lenet", lambda *_, **__: model.lesson_net),
                (lesson, "initialize", lambda *_, **__: None),
                (datasets, "load_fashion_mnist", lambda *_, **__: ([batch], [batch])),
                (devices, "contexts", lambda *_, **__: model.ctx),
            ):
                stack.enter_context(patch.object(owner, name, replacement))
            stack.enter_context(redirect_stdout(io.StringIO()))
            function(**arguments)
    except _FirstStep as found:
        trainer = found.trainer
    except (Exception, SystemExit) as error:
        raise Error(f"{function.__name__} fails before its first step: {where(error)}") from None
    else:
        raise Error(f"{function.__name__} does not call train_batch")
    if not isinstance(trainer, gluon.Trainer):
        raise Error(f"{function.__name__} passes {type(trainer).__name__} to train_batch, not a gluon.Trainer")
    if not {*trainer._params} <= {*model.parameters.values()}:
        raise Error(f"the Trainer of {function.__name__} is for another network than that of lenet")
    if k == 1 and trainer._kvstore_params["update_on_kvstore"]:  # on one device, MXNet has no store, and fails
        trainer._kvstore_params["update_on_kvstore"] = None
    return trainer
