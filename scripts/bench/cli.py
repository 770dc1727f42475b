"""`python scripts/bench.py SUBCOMMAND`: the options of each subcommand, and the call that runs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from bench import harness
from gluon_mgpu.commands import common


@click.group(
    cls=common.Group,
    examples="""
        python scripts/bench.py steps
        python scripts/bench.py allreduce --out runs/bench
        python scripts/bench.py steps --help
    """,
)
def bench() -> None:
    """Measure speed and memory. Each subcommand prints a table."""


def measurement(
    name: str, *options: Any, module: str | None = None, help: str | None = None, example: str = "", **arguments: Any
) -> None:
    """Declare a subcommand that calls `run` of bench.MODULE (None: bench.NAME) and prints a table of the result.

    help: None: the first paragraph of the module's docstring. arguments: passed to `run` with the options. --out also
    writes the result, and a plot if the module can draw one.
    """
    benchmark = import_module(f"bench.{module or name}")

    def measure(out: str | None, **chosen: Any) -> None:
        if out is not None:
            harness.create(out)
        result = benchmark.run(**arguments, **chosen)
        click.echo(benchmark.table(result))
        if out is not None:
            file = f"{name}-{harness.processor()}" if name == "peers" else name
            harness.write(out, file, result, getattr(benchmark, "draw", None))
            click.echo(f"result: {out}/{file}.json")

    for option in (out, *reversed(options)):
        measure = option(measure)
    help = help or (benchmark.__doc__ or "").partition("\n\n")[0]
    first = " ".join(["python scripts/bench.py", name, *example.split()])
    bench.command(name, cls=common.Command, help=help, examples=f"{first}\n{first} --out runs/bench")(measure)


out = common.settings("out", out={"help": "Write the result, and its plot if there is one, to this folder."})


def number(name: str, help: str, default: Any = None, least: int = 1, **options: Any) -> Any:
    """Declare an option whose value is a whole number."""
    return common.option(name, type=click.IntRange(min=least), metavar="N", default=default, help=help, **options)


def rounds(default: int, least: int = 3) -> Any:
    return number("--rounds", "Number of repetitions of each measurement.", default, least)


networks = click.Choice(tuple(harness.TITLE))
model = common.option(
    "--model",
    type=networks,
    default=networks.choices,
    multiple=True,
    help="Network. The batch size is 256 (lenet) or 64 (resnet18) unless it is varied.",
)
steps = number("--steps", "Steps per run of LeNet; a run of ResNet-18 has a tenth of this number.", 100, least=10)


measurement(
    "steps",
    common.option(
        "--what",
        type=click.Choice(("step", "resnet18", "engine")),
        default=("step", "resnet18"),
        multiple=True,
        help="step: a step of LeNet. resnet18: a step of ResNet-18. engine: steps with changed engine settings.",
    ),
    rounds(3),
    steps,
)
measurement("roofline", model, steps)
two_devices = common.settings("num_gpus", "device", num_gpus={"default": "2"})
measurement("async", two_devices, rounds(5), module="asynchrony", what="async")
measurement(
    "copy",
    common.settings(
        "num_gpus",
        "device",
        num_gpus={"help": "Number of devices, or their indices. Only the first device is measured."},
    ),
    rounds(5),
    module="asynchrony",
    help="Measure matrix products and copies to the host. Copies all results at the end, or each as soon as possible.",
    what="copy",
)
measurement(
    "allreduce",
    number("--contexts", "Number of CPU contexts; 8 contexts need 3.5 GB of memory.", (1, 2, 4, 8), multiple=True),
    rounds(5),
)
measurement("partition", rounds(3), steps)
measurement(
    "scaling",
    model,
    number("--contexts", "Number of CPU contexts; 1 is always measured.", (1, 2, 4, 8), multiple=True),
    number("--batch-size", "Batch size (weak scaling: per context). Default: 256, or 64 for ResNet-18.", multiple=True),
    rounds(3),
    steps,
)
measurement("batch", model, rounds(3), steps)
measurement("shares", rounds(3), steps)
measurement("distributed", model, rounds(3), steps)
measurement("model", click.argument("folder", type=common.FOLDER), example="runs/bench")
measurement(
    "timeline",
    common.settings("impl"),
    common.option("--model", type=networks, default="lenet", help="scratch supports only lenet."),
    number("--contexts", "Number of CPU contexts.", 2),
)
measurement("peers", model, rounds(5, least=5), steps)
