"""`python scripts/bench.py SUBCOMMAND`: each subcommand is its options and one call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource

from gluon_mgpu.commands import common
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training.settings import MODELS

WHAT = ("step", "resnet18", "overhead", "engine", "profile")


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
    """A subcommand. examples: further examples of its options."""
    lines = [f"python scripts/bench.py {name}", *(f"python scripts/bench.py {name} {options}" for options in examples)]
    return bench.command(name, cls=common.Command, examples="\n".join(lines))


def number(name: str, help: str, default: Any = None, least: int = 1, **options: Any) -> Any:
    """An option that takes a whole number."""
    kind = click.IntRange(min=least)
    return common.option(name, type=kind, metavar="N", default=default, show_default=True, help=help, **options)


def choice(name: str, words: Any, default: Any, help: str, **options: Any) -> Any:
    """An option that takes one of some words."""
    return common.option(name, type=common.Choice(words), default=default, show_default=True, help=help, **options)


def out(files: str) -> Any:
    return common.option("--out", type=common.FOLDER, metavar="DIR", help=f"A folder for {files}.")


def rounds(default: int, least: int = 3) -> Any:
    return number("--rounds", "How often each measurement is repeated.", default, least)


def contexts(note: str) -> Any:
    return number("--contexts", f"How many CPU contexts; {note}", (1, 2, 4, 8), multiple=True)


networks = ("lenet", "resnet18")
model = choice("--model", networks, networks, "LeNet with batch size 256, ResNet-18 with 64.", multiple=True)
steps = number("--steps", "Steps per run of LeNet; a tenth of them for ResNet-18.", 100, least=10)
size = common.option(
    "--size",
    type=click.IntRange(min=1, max=46340),
    metavar="M",
    help="M x M float32 matrices; default 4000 on GPUs, 1000 on CPU contexts. With 4000 and 50 products, as in the "
    "notebook, its seconds are shown too.",
)
products = number("--products", "Products per device; default 50 on GPUs, 20 on CPU contexts.")


def show(name: str, module: str, out: str | None, **options: Any) -> None:
    """Run a measurement, print its table and, with --out, write its JSON and picture."""
    from bench import harness

    benchmark = import_module(f"bench.{module}")
    result = benchmark.run(**options)
    click.echo(benchmark.table(result))
    if out is not None:
        harness.leave(out, name, result, benchmark.draw)
        click.echo(f"picture: {out}/{name}.png")


@command("steps", "--rounds 5 --steps 200", "--what engine")
@choice(
    "--what",
    WHAT,
    ("step", "resnet18"),
    "step: LeNet's. resnet18: ResNet-18's. overhead: what an epoch costs besides computation. engine: without each of "
    "the engine's settings. profile: the time of each operator.",
    multiple=True,
)
@rounds(3)
@steps
def steps_command(what: tuple[str, ...], rounds: int, steps: int) -> None:
    """Time and memory of a step, next to the notebook's code. Each in its own process, in turn."""
    from bench import steps as benchmark

    for name in what:
        if name == "overhead":
            click.echo(benchmark.overhead(rounds))
        elif name == "profile":
            click.echo(benchmark.profile(steps))
        else:
            click.echo(benchmark.speeds(name, rounds, steps))


@command("async", "--gpus 4 --device gpu")
@common.gpus("2")
@common.device
@size
@products
@rounds(5)
@out("async.json and async.png")
def async_command(out: str | None, **options: Any) -> None:
    """When calls return, and when their work is done. Products of matrices on devices one after another, or at once."""
    show("async", "asynchrony", out, what="async", **options)


@command("copy", "--size 2000 --out runs/bench")
@common.gpus("1", "The first of these devices is measured.")
@common.device
@size
@products
@rounds(5)
@out("copy.json and copy.png")
def copy_command(out: str | None, **options: Any) -> None:
    """Products of matrices and their copies to the host. After all products, or each as soon as it can."""
    show("copy", "asynchrony", out, what="copy", **options)


@command("allreduce", "--contexts 2 --contexts 4 --out runs/bench")
@contexts("8 need 3.5 GB of memory.")
@rounds(5)
@out("allreduce.json and allreduce.png")
def allreduce_command(out: str | None, **options: Any) -> None:
    """Sums of arrays over CPU contexts, by size and by way."""
    show("allreduce", "allreduce", out, **options)


@command("partition", "--rounds 5 --out runs/bench")
@rounds(3)
@number("--steps", "Steps per run.", 100, least=10)
@out("partition.json and partition.png")
def partition_command(out: str | None, **options: Any) -> None:
    """Three ways to split LeNet over two devices. Their time, the bytes they move, and idle devices."""
    show("partition", "partition", out, **options)


@command("scaling", "--model lenet --contexts 2 --contexts 16 --out runs/bench")
@model
@contexts("1 is always measured too.")
@rounds(3)
@steps
@out("scaling.json and scaling.png")
def scaling_command(out: str | None, **options: Any) -> None:
    """Strong and weak scaling over CPU contexts."""
    show("scaling", "scaling", out, **options)


@command("distributed", "--model lenet --rounds 5 --out runs/bench", "--what compression --out runs/bench")
@choice(
    "--what",
    ("speed", "compression"),
    "speed",
    "compression: bytes sent and accuracy of LeNet on Fashion-MNIST, with and without it.",
)
@model
@rounds(3)
@steps
@number("--epochs", "For compression.", 4)
@number("--limit", "For compression: train on the first N examples.")
@out("distributed.json and distributed.png, or compression.json and compression.png")
@click.pass_context
def distributed_command(context: click.Context, what: str, rounds: int, out: str | None, **options: Any) -> None:
    """2 processes of 1 context against 1 process of 2. Over Horovod and MXNet's parameter servers."""
    used = {"speed": ("model", "steps"), "compression": ("epochs", "limit")}[what]
    for name, value in options.items():
        if name not in used and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name} {value}: does not apply to --what {what}; omit it")
    name = "distributed" if what == "speed" else what
    show(name, name, out, rounds=rounds, **{name: options[name] for name in used})


@bench.command(
    "model",
    cls=common.Command,
    examples="""
        python scripts/bench.py allreduce --out runs/bench && python scripts/bench.py scaling --out runs/bench
        python scripts/bench.py model runs/bench --out runs/bench
    """,
)
@click.argument("folder", type=common.FOLDER)
@out("model.json and model.png")
def model_command(out: str | None, **options: Any) -> None:
    """Fit a cost model, and predict clusters. Needs what `allreduce --out` and `scaling --out` left in FOLDER."""
    show("model", "model", out, **options)


@command("timeline", "--impl highlevel --model resnet18 --out runs/bench")
@common.impl
@common.setting("--model", type=common.Choice(MODELS), help="scratch has only lenet.")
@number("--contexts", "How many CPU contexts.", 2)
@number("--batch-size", "Over all contexts; default 256, for ResNet-18 64.")
@number("--steps", "Recorded steps.", 5)
@out("timeline.json, timeline.png and timeline.trace.json, for chrome://tracing and Perfetto")
def timeline_command(out: str | None, **options: Any) -> None:
    """What each context does during a few steps, from the engine's profile."""
    show("timeline", "timeline", out, **options)


@command("peers", "--model lenet --rounds 9 --out runs/bench", "--model lenet --accuracy")
@model
@rounds(5, least=5)
@steps
@common.option("--accuracy", is_flag=True, help="Also train LeNet on Fashion-MNIST for 4 epochs with each.")
@out("peers.json and peers.png")
def peers_command(out: str | None, **options: Any) -> None:
    """The same network, data and batches here and in PyTorch. In one process, and distributed."""
    show("peers", "peers", out, **options)
