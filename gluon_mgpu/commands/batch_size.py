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
        gluon-mgpu batch-size --sweep --impl highlevel
        gluon-mgpu batch-size --dataset synthetic --limit 12000
    """,
)
@common.option(
    "--sweep",
    is_flag=True,
    help="Run a sweep instead: batch sizes 128, 256 and 512 with 0.5 to 4 times the learning rate, on 2 devices "
    "(15 runs).",
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
    help="Seed for all runs. Accuracies in the first epochs vary widely between seeds.",
)
@common.limit
@common.data_dir
@common.out(
    "Write a plot, a CSV file, and one folder per run to this folder; finished runs are skipped.",
    default="runs/batch-size",
)
def batch_size(sweep: bool, out: str, **options: Any) -> None:
    """Compare batch sizes on one and two devices. Runs the lecture's experiment: 1 and 2 devices with batch sizes 256
    and 512, and 2 devices with batch size 512 and a scaled learning rate. Shows times and test accuracies as a table
    and a plot. With --sweep, compares learning rates."""
    from gluon_mgpu.training import batch_size as experiment

    if sweep:
        click.echo(experiment.sweep_table(experiment.sweep(out, **options)))
        click.echo(f"see {out}/{experiment.SWEEP}.png, and {experiment.SWEEP}.csv for the results of each epoch")
    else:
        click.echo(experiment.table(experiment.run(out, **options)))
        click.echo(f"see {out}/{experiment.NAME}.png for the accuracy by epoch, by step and by time")
