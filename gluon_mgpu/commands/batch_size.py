"""`gluon-mgpu batch-size`: the lecture's experiment on batch sizes."""

from __future__ import annotations

from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.training import datasets


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu batch-size
        gluon-mgpu batch-size --impl highlevel --epochs 10 --out runs/batch-size-10
        gluon-mgpu batch-size --dataset synthetic --limit 12000
    """,
)
@common.impl
@common.setting("--dataset", type=click.Choice(datasets.NAMES), help="synthetic needs no files.")
@common.device
@common.setting("--lr", type=common.POSITIVE, metavar="X", help="Learning rate for batch size 256.")
@common.setting("--epochs", type=common.COUNT, metavar="N", help="Number of passes through the training set.")
@common.option(
    "--seed",
    type=common.SEED,
    metavar="N",
    default=1,
    help="Seed of all four runs. Accuracies of the first epochs vary a lot between seeds.",
)
@common.limit
@common.data_dir
@common.out(
    "Write the picture and one folder per run to this folder; finished runs are skipped.", default="runs/batch-size"
)
def batch_size(out: str, **options: Any) -> None:
    """Compare batch sizes on one and two devices. Runs the lecture's experiment: 1 device with batch size 256; 2
    devices with 256, with 512, and with 512 and a scaled learning rate. Shows times and test accuracies as a table and
    a picture."""
    from gluon_mgpu.training import batch_size as experiment

    click.echo(experiment.table(experiment.run(out, **options)))
    click.echo(f"see {out}/{experiment.PICTURE} for the accuracy by epoch and by time")
