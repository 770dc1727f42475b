"""`python scripts/bench.py SUBCOMMAND`: the options of each subcommand, and the call that runs it."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import click

from bench import harness
from gluon_mgpu.commands import common


@click.group(
    cls=common.CommandGroup,
    examples="""
        python scripts/bench.py steps
        python scripts/bench.py allreduce --out runs/bench
        python scripts/bench.py steps --help
    """,
)
def bench() -> None:
    """Measure speed and memory. Each subcommand prints a table."""


def measurement(name: str, *options: Any) -> None:
    """Declare a subcommand that calls `run` of the module bench.NAME with the options, and prints a table of the
    result. --out also writes the result, and a plot if the module can draw one."""
    benchmark = import_module(f"bench.{name}")

    def measure(out: str | None, **chosen: Any) -> None:
        if out is not None:
            os.makedirs(out, exist_ok=True)
        result = benchmark.run(**chosen)
        click.echo(benchmark.table(result))
        if out is not None:
            harness.write(out, name, result, getattr(benchmark, "draw", None))
            click.echo(f"result: {out}/{name}.json")

    for option in (OUT, *reversed(options)):
        measure = option(measure)
    help = (benchmark.__doc__ or "").partition("\n\n")[0]
    example = f"python scripts/bench.py {name}"
    bench.command(name, cls=common.Command, help=help, examples=f"{example}\n{example} --out runs/bench")(measure)


def number(name: str, help: str, default: Any = None, least: int = 1, **options: Any) -> Any:
    """Declare an option whose value is a whole number."""
    return common.option(name, type=click.IntRange(min=least), metavar="N", default=default, help=help, **options)


def rounds(default: int) -> Any:
    return number("--rounds", "Number of repetitions of each measurement.", default)


OUT = common.option(
    "--out",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    help="Write the result, and its plot if there is one, to this folder.",
)
networks = click.Choice(tuple(harness.TITLE))
model = common.option(
    "--model",
    type=networks,
    default=networks.choices,
    multiple=True,
    help="Network. The batch size is 256 (lenet) or 64 (resnet18) unless it is varied.",
)
steps = number("--steps", "Steps per run of LeNet; a run of ResNet-18 has a tenth of this number.", 100)
contexts = number("--contexts", "Number of CPU contexts; 1 is always measured.", (1, 2, 4, 8), multiple=True)
batch_size = number(
    "--batch-size", "Batch size (weak scaling: per context). Default: 256, or 64 for ResNet-18.", multiple=True
)

measurement("steps", model, rounds(3), steps)
measurement("allreduce", rounds(5))
measurement("partition", rounds(3), steps)
measurement("scaling", model, contexts, batch_size, rounds(3), steps)
measurement("distributed", model, rounds(5), steps)
measurement("peers", model, rounds(5), steps)
sizes = number("--batch-size", "Batch size.", (16, 64, 256, 512, 1024, 4096), multiple=True)
device = common.option("--device", type=click.Choice(["gpu", "cpu"]), default="gpu", help="cpu tries the program.")
measurement("gpu", model, sizes, device, number("--steps", "Steps per measurement.", 30))
