"""`python scripts/bench.py GRID`."""

from __future__ import annotations

import click

from bench import grids
from gluon_mgpu.commands import common
from gluon_mgpu.support.params import FOLDER


@click.command(
    cls=common.Command,
    examples="python scripts/bench.py peers --out runs/bench",
    help="Measure speed and memory at each point of a grid, and print a table.\n\n\b\n"
    + "\n".join(f"{name:12s} {grid.about}" for name, grid in grids.GRIDS.items()),
)
@click.argument("grid", type=click.Choice([*grids.GRIDS]))
@common.option("--rounds", type=click.IntRange(1), default=10, help="Turns of each point.")
@common.option(
    "--steps",
    type=click.IntRange(1),
    default=20,
    help="Steps of LeNet with 256 examples in each turn; fewer with ResNet-18 or larger batches.",
)
@common.option(
    "--only",
    multiple=True,
    metavar="TEXT",
    help="Measure only points whose names contain this text, such as 'LeNet: scratch'; can be repeated.",
)
@common.option(
    "--out",
    type=FOLDER,
    metavar="FOLDER",
    help="Write GRID.json and the picture GRID.png to this folder.",
)
def bench(grid: str, rounds: int, steps: int, only: tuple[str, ...], out: str | None) -> None:
    result = grids.measure_grid(grid, rounds, steps, only)
    click.echo(grids.table(result))
    if out is not None:
        grids.write(out, result)
        click.echo(f"written: {out}/{grid}.json, {out}/{grid}.png")
