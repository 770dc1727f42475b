"""`python scripts/bench.py SUBCOMMAND`: the options of each subcommand, and the call that runs it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.training.settings import MODELS


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


def command(name: str, *examples: str) -> Any:
    """Declare a subcommand. examples: arguments of the example commands in its --help."""
    lines = [f"python scripts/bench.py {name} {example}".rstrip() for example in examples]
    return bench.command(name, cls=common.Command, examples="\n".join(lines))


def number(name: str, help: str, default: Any = None, least: int = 1, **options: Any) -> Any:
    """Declare an option whose value is a whole number."""
    kind = click.IntRange(min=least)
    return common.option(name, type=kind, metavar="N", default=default, show_default=True, help=help, **options)


def choice(name: str, words: Any, default: Any, help: str, **options: Any) -> Any:
    """Declare an option whose value is one of several words."""
    return common.option(name, type=click.Choice(words), default=default, show_default=True, help=help, **options)


def out(files: str) -> Any:
    return common.option("--out", type=common.FOLDER, metavar="DIR", help=f"Write {files} to this folder.")


def rounds(default: int, least: int = 3) -> Any:
    return number("--rounds", "Number of repetitions of each measurement.", default, least)


def contexts(note: str) -> Any:
    return number("--contexts", f"Number of CPU contexts; {note}", (1, 2, 4, 8), multiple=True)


networks = ("lenet", "resnet18")
model = choice(
    "--model",
    networks,
    networks,
    "Network. The batch size is 256 (lenet) or 64 (resnet18) unless it is varied.",
    multiple=True,
)
steps = number("--steps", "Steps per run of LeNet; ResNet-18 takes a tenth of this number.", 100, least=10)
size = common.option(
    "--size",
    type=click.IntRange(min=1, max=46340),
    metavar="M",
    help="Use M x M float32 matrices. Default: 4000 on GPUs, as in the notebook; 1000 on CPU contexts.",
)
products = number("--products", "Number of products per device. Default: 50 on GPUs, 20 on CPU contexts.")


def show(name: str, module: str, out: str | None, **options: Any) -> None:
    """Run a measurement and print its table. With --out, write its result and its plot, if any."""
    from bench import harness

    benchmark = import_module(f"bench.{module}")
    result = benchmark.run(**options)
    click.echo(benchmark.table(result))
    if out is not None:
        harness.write(out, name, result, getattr(benchmark, "draw", None))
        click.echo(f"result: {out}/{name}.json")


@command("steps", "", "--rounds 5 --steps 200", "--what engine")
@choice(
    "--what",
    ("step", "resnet18", "engine", "profile"),
    ("step", "resnet18"),
    "step: a step of LeNet. resnet18: a step of ResNet-18. engine: steps with changed engine settings. profile: the "
    "time of each operator.",
    multiple=True,
)
@rounds(3)
@steps
def steps_command(what: tuple[str, ...], rounds: int, steps: int) -> None:
    """Measure the time and memory of a training step and of the notebook's step, each in its own process."""
    from bench import steps as benchmark

    for name in what:
        click.echo(benchmark.profile(steps) if name == "profile" else benchmark.speeds(name, rounds, steps))


@command("roofline", "", "--model lenet --out runs/bench")
@model
@steps
@out("roofline.json")
def roofline_command(out: str | None, **options: Any) -> None:
    """Measure the time, FLOP and bytes of each operator of a step, next to what a core sustains."""
    show("roofline", "roofline", out, **options)


@command("async", "", "--gpus 4 --device gpu")
@common.gpus("2")
@common.device
@size
@products
@rounds(5)
@out("async.json")
def async_command(out: str | None, **options: Any) -> None:
    """Measure when calls return and when their work is done. Multiplies matrices on the devices in turn and at once."""
    show("async", "asynchrony", out, what="async", **options)


@command("copy", "", "--size 2000 --out runs/bench")
@common.gpus("1", "Number of devices, or their indices. Only the first device is measured.")
@common.device
@size
@products
@rounds(5)
@out("copy.json")
def copy_command(out: str | None, **options: Any) -> None:
    """Measure matrix products and copies to the host. Copies results after all products, or as early as possible."""
    show("copy", "asynchrony", out, what="copy", **options)


@command("allreduce", "", "--contexts 2 --contexts 4 --out runs/bench")
@contexts("8 contexts need 3.5 GB of memory.")
@rounds(5)
@out("allreduce.json")
def allreduce_command(out: str | None, **options: Any) -> None:
    """Measure ways to sum gradients across CPU contexts."""
    show("allreduce", "allreduce", out, **options)


@command("partition", "", "--rounds 5 --out runs/bench")
@rounds(3)
@number("--steps", "Steps per run.", 100, least=10)
@out("partition.json")
def partition_command(out: str | None, **options: Any) -> None:
    """Compare three ways to split LeNet across two devices. Shows times, bytes moved and idle times."""
    show("partition", "partition", out, **options)


@command(
    "scaling",
    "",
    "--model lenet --contexts 2 --contexts 16 --out runs/bench",
    "--contexts 2 --batch-size 32 --batch-size 512",
)
@model
@contexts("1 is always measured.")
@number(
    "--batch-size", "Batch size (with weak scaling, per context). Default: 256, or 64 for ResNet-18.", multiple=True
)
@rounds(3)
@steps
@out("scaling.json and scaling.png")
def scaling_command(out: str | None, **options: Any) -> None:
    """Measure strong and weak scaling across CPU contexts."""
    show("scaling", "scaling", out, **options)


@command("batch", "", "--model lenet --rounds 5 --out runs/bench")
@model
@rounds(3)
@steps
@out("batch.json")
def batch_command(out: str | None, **options: Any) -> None:
    """Measure the speed-up from a second device at several batch sizes, what limits it, and peak memory."""
    show("batch", "batch", out, **options)


@command("shares", "", "--rounds 5 --out runs/bench")
@rounds(3)
@number("--steps", "Steps per run.", 100, least=10)
@out("shares.json")
def shares_command(out: str | None, **options: Any) -> None:
    """Compare equal and unequal shards while one of two cores also runs other programs."""
    show("shares", "shares", out, **options)


@command("distributed", "", "--model lenet --rounds 5 --out runs/bench")
@model
@rounds(3)
@steps
@out("distributed.json")
def distributed_command(out: str | None, **options: Any) -> None:
    """Compare 2 processes with 1 context each to 1 process with 2 contexts. Uses Horovod and parameter servers."""
    show("distributed", "distributed", out, **options)


@command("model", "runs/bench --out runs/bench")
@click.argument("folder", type=common.FOLDER)
@out("model.json and model.png")
def model_command(out: str | None, **options: Any) -> None:
    """Fit a cost model, and predict step times on clusters. FOLDER contains the result of `scaling --out`."""
    show("model", "model", out, **options)


@command("timeline", "", "--impl highlevel --model resnet18 --out runs/bench")
@common.impl
@common.setting("--model", type=click.Choice(MODELS), help="scratch supports only lenet.")
@number("--contexts", "Number of CPU contexts.", 2)
@number("--batch-size", "Batch size across all contexts. Default: 256, or 64 for ResNet-18.")
@number("--steps", "Number of recorded steps.", 5)
@out("timeline.json, timeline.png and timeline.trace.json, for chrome://tracing and Perfetto")
def timeline_command(out: str | None, **options: Any) -> None:
    """Record what each context does during a few steps, with the engine's profiler."""
    show("timeline", "timeline", out, **options)


@command("peers", "", "--model lenet --rounds 9 --out runs/bench")
@model
@rounds(5, least=5)
@steps
@out("peers-PROCESSOR.json and peers-PROCESSOR.png")
def peers_command(out: str | None, **options: Any) -> None:
    """Compare with PyTorch on the same network, data and batches. Measures training in one and in two processes."""
    from bench import harness

    show(f"peers-{harness.processor()}", "peers", out, **options)
