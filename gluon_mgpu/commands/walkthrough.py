"""`gluon-mgpu walkthrough`: run the notebooks' inspection cells."""

from __future__ import annotations

from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.training import datasets


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu walkthrough
        gluon-mgpu walkthrough --impl highlevel --gpus 2
        gluon-mgpu walkthrough --dataset synthetic --gpus 0,2 --device cpu
    """,
)
@common.impl
@common.setting("--dataset", type=click.Choice(datasets.NAMES), help="synthetic needs no files.")
@common.gpus("4", "Number of devices, or a list of indices. Missing GPUs are skipped.")
@common.device
@common.option("--seed", type=common.SEED, metavar="N", default=0, help="Seed for parameters and synthetic data.")
@common.data_dir
def walkthrough(impl: str, gpus: str, **options: Any) -> None:
    """Run the inspection cells of the notebooks that this project follows. They show what each device holds at each
    stage of a training step."""
    indices = devices.parse(gpus)
    engine.configure(len(indices))  # before `walkthrough` imports mxnet
    from gluon_mgpu import walkthrough as tour

    tour.walk(impl, indices, **options)
