"""`gluon-mgpu walkthrough`: run the notebooks' inspection cells."""

from __future__ import annotations

from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.runtime import devices, engine


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu walkthrough
        gluon-mgpu walkthrough --impl highlevel --gpus 2
        gluon-mgpu walkthrough --dataset synthetic --gpus 0,2 --device cpu
    """,
)
@common.settings(
    *("impl", "dataset", "num_gpus", "device", "seed", "data_dir"),
    num_gpus={"default": "4", "help": "Number of devices, or a list of indices. Missing GPUs are skipped."},
    seed={"default": 0, "help": "Seed for parameters and synthetic data."},
)
def walkthrough(impl: str, num_gpus: str, **options: Any) -> None:
    """Run the inspection cells of the notebooks that this project follows. They show what each device holds at each
    stage of a training step."""
    indices = devices.parse(num_gpus)
    engine.configure(len(indices))  # before `walkthrough` imports mxnet
    from gluon_mgpu import walkthrough as tour

    tour.walk(impl, indices, **options)
