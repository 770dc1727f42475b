"""`python scripts/batch_size.py`: compare batch sizes on one and two devices, as in the lecture."""

from __future__ import annotations

from typing import Any

import click

from gluon_mgpu.commands import common


@click.command(
    cls=common.Command,
    examples="""
        python scripts/batch_size.py
        python scripts/batch_size.py --impl highlevel --epochs 10 --out runs/batch-size-10
        python scripts/batch_size.py --dataset synthetic --limit 12000
    """,
)
@common.settings(
    *("impl", "dataset", "device", "lr", "epochs", "seed", "limit", "data_dir", "out"),
    lr={"help": "Learning rate, before any scaling."},
    seed={"default": 1, "help": "Seed for all runs. Accuracies in the first epochs vary widely between seeds."},
    out={"default": "runs/batch-size", "help": "Write one folder per run to this folder; finished runs are skipped."},
)
def batch_size(**options: Any) -> None:
    """Compare batch sizes on one and two devices. This runs the lecture's experiment (docs/batch-size.md): batch sizes
    256 and 512, each on 1 and 2 devices, and batch size 512 on 2 devices with a scaled learning rate. The times and
    test accuracies are shown as a table."""
    from batch_size import experiment

    click.echo(experiment.table(experiment.run(**options)))
