"""`python scripts/bench.py SUBCOMMAND`: the options of each subcommand, and the call that runs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

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
    name: str, help: str, *options: Any, module: str | None = None, example: str = "", **arguments: Any
) -> None:
    """Declare a subcommand that calls `run` of bench.MODULE (None: bench.NAME) and prints a table of the result.

    arguments: passed to `run` with the options. --out also writes the result, and a plot if the module can draw one.
    """

    def measure(out: str | None, **chosen: Any) -> None:
        from bench import harness

        benchmark = import_module(f"bench.{module or name}")
        result = benchmark.run(**arguments, **chosen)
        click.echo(benchmark.table(result))
        if out is not None:
            file = f"{name}-{harness.processor()}" if name == "peers" else name
            harness.write(out, file, result, getattr(benchmark, "draw", None))
            click.echo(f"result: {out}/{file}.json")

    for option in (common.out("Write the result, and its plot if there is one, to this folder."), *reversed(options)):
        measure = option(measure)
    first = " ".join(["python scripts/bench.py", name, *example.split()])
    bench.command(name, cls=common.Command, help=help, examples=f"{first}\n{first} --out runs/bench")(measure)


def number(name: str, help: str, default: Any = None, least: int = 1, **options: Any) -> Any:
    """Declare an option whose value is a whole number."""
    return common.option(name, type=click.IntRange(min=least), metavar="N", default=default, help=help, **options)


def rounds(default: int, least: int = 3) -> Any:
    return number("--rounds", "Number of repetitions of each measurement.", default, least)


NETWORKS = ("lenet", "resnet18")
model = common.option(
    "--model",
    type=click.Choice(NETWORKS),
    default=NETWORKS,
    multiple=True,
    help="Network. The batch size is 256 (lenet) or 64 (resnet18) unless it is varied.",
)
steps = number("--steps", "Steps per run of LeNet; a run of ResNet-18 has a tenth of this number.", 100, least=10)


measurement(
    "steps",
    "Measure the time and memory of a training step and of the notebook's step, each in its own process.",
    common.option(
        "--what",
        type=click.Choice(("step", "resnet18", "engine", "profile")),
        default=("step", "resnet18"),
        multiple=True,
        help="step: a step of LeNet. resnet18: a step of ResNet-18. engine: steps with changed engine settings. "
        "profile: the time of each operator.",
    ),
    rounds(3),
    steps,
)
measurement(
    "roofline",
    "Compare the speed of each operator in a step, in FLOP/s and bytes/s, with what one core can sustain.",
    model,
    steps,
)
measurement(
    "async",
    "Measure when calls return and when their work is done. Multiplies matrices on one device at a time, then on all.",
    common.gpus("2"),
    common.device,
    rounds(5),
    module="asynchrony",
    what="async",
)
measurement(
    "copy",
    "Measure matrix products and copies to the host. Copies all results at the end, or each as soon as possible.",
    common.gpus("1", "Number of devices, or their indices. Only the first device is measured."),
    common.device,
    rounds(5),
    module="asynchrony",
    what="copy",
)
measurement(
    "allreduce",
    "Compare ways to sum gradients across CPU contexts.",
    number("--contexts", "Number of CPU contexts; 8 contexts need 3.5 GB of memory.", (1, 2, 4, 8), multiple=True),
    rounds(5),
)
measurement(
    "partition",
    "Compare three ways to split LeNet across two devices. Shows times, bytes moved and idle times.",
    rounds(3),
    steps,
)
measurement(
    "scaling",
    "Measure strong and weak scaling across CPU contexts.",
    model,
    number("--contexts", "Number of CPU contexts; 1 is always measured.", (1, 2, 4, 8), multiple=True),
    number("--batch-size", "Batch size (weak scaling: per context). Default: 256, or 64 for ResNet-18.", multiple=True),
    rounds(3),
    steps,
)
measurement(
    "batch",
    "Measure peak memory, the speed-up from a second device, and what limits the speed-up, at several batch sizes.",
    model,
    rounds(3),
    steps,
)
measurement(
    "shares",
    "Compare equal and unequal shards while one of two cores also runs other programs.",
    rounds(3),
    steps,
)
measurement(
    "distributed",
    "Compare 2 processes with 1 context each to 1 process with 2 contexts. Uses Horovod and parameter servers.",
    model,
    rounds(3),
    steps,
)
measurement(
    "model",
    "Fit a cost model, and predict step times on clusters. FOLDER contains the result of `scaling --out`.",
    click.argument("folder", type=common.FOLDER),
    example="runs/bench",
)
measurement(
    "timeline",
    "Use the engine's profiler to record what each context does during a few steps. chrome://tracing and Perfetto open "
    "the result.",
    common.impl,
    common.option("--model", type=click.Choice(NETWORKS), default="lenet", help="scratch supports only lenet."),
    number("--contexts", "Number of CPU contexts.", 2),
    number("--batch-size", "Batch size across all contexts. Default: 256, or 64 for ResNet-18."),
    number("--steps", "Number of recorded steps.", 5),
)
measurement(
    "peers",
    "Compare this project with PyTorch, in one process and in two, on the same network, data and batches.",
    model,
    rounds(5, least=5),
    steps,
)
