"""`gluon-mgpu train`: train a network on one or several devices. Its options are the fields of `Config`."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from gluon_mgpu import __version__
from gluon_mgpu.commands import common
from gluon_mgpu.training.train import run_training


@common.command(
    examples="""
        gluon-mgpu train --impl scratch --gpus 2
        gluon-mgpu train --impl highlevel --gpus 0,2 --device gpu
        gluon-mgpu train --impl highlevel --model lenet-max --dataset mnist --gpus 4 --lr 0.3 --epochs 5
        gluon-mgpu train --impl highlevel --model resnet18 --gpus 2 --lr 0.1 --momentum 0.9 --schedule cosine
        gluon-mgpu train --impl highlevel --gpus 4 --seed 1 --out runs/first
        gluon-mgpu train --resume runs/first --epochs 10
    """,
)
@common.settings()
@click.version_option(__version__)
@click.pass_context
def train(context: click.Context, **options: Any) -> None:
    """Train LeNet or ResNet-18 with data parallelism, and print the time and test accuracy after each epoch."""
    run_training({n: options[n] for n in options if context.get_parameter_source(n) == ParameterSource.COMMANDLINE})
