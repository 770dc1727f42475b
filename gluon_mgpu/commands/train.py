"""`gluon-mgpu train`: train a network on one or several devices. Its options are the fields of `Config`."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from gluon_mgpu import __version__
from gluon_mgpu.commands import common
from gluon_mgpu.support.errors import UsageError, setting
from gluon_mgpu.training import recipes
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.train import run_training


@common.command(
    examples="""
        gluon-mgpu train --impl scratch --gpus 2
        gluon-mgpu train --impl highlevel --gpus 0,2 --device gpu
        gluon-mgpu train --recipe gluon-lenet-mnist-4gpu
        gluon-mgpu train --impl highlevel --model resnet18 --gpus 2 --lr 0.1 --momentum 0.9 --schedule cosine
        gluon-mgpu train --impl highlevel --gpus 4 --seed 1 --out runs/first
        gluon-mgpu train --resume runs/first --epochs 10
    """,
)
@common.option(
    "--recipe",
    type=click.Choice(tuple(recipes.RECIPES)),
    metavar="NAME",
    group="Network and data",
    help=f"Run one of the notebooks' experiments: {', '.join(recipes.RECIPES)}. Other options override its values.",
)
@common.settings()
@click.version_option(__version__)
@click.pass_context
def train(context: click.Context, recipe: str | None, **options: Any) -> None:
    """Train LeNet or ResNet-18 with data parallelism, and print the time and test accuracy after each epoch."""
    given = {n: options[n] for n in options if context.get_parameter_source(n) == ParameterSource.COMMANDLINE}
    if recipe and options["resume"] is not None:
        raise UsageError("recipe", recipe, f"cannot be combined with {setting('resume')}: a run has its own settings")
    if recipe:
        given = {**Config.parse(recipes.RECIPES[recipe].options), **given}
    run_training(given)
