"""`python scripts/bench.py SUBCOMMAND`: each subcommand is its options and one call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import click
from click.core import ParameterSource

from gluon_mgpu.commands import common
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training.settings import MODELS

WHAT = ("step", "evaluate", "resnet18", "overhead", "engine", "profile", "main-job")
POSITIVE = click.IntRange(min=1)
models = common.option(
    "--model",
    "models",
    type=common.Choice(["lenet", "resnet18"]),
    multiple=True,
    default=("lenet", "resnet18"),
    show_default=True,
    help="LeNet with batch size 256, ResNet-18 with 64.",
)
steps_per_run = common.option(
    "--steps",
    type=click.IntRange(min=10),
    metavar="N",
    default=100,
    show_default=True,
    help="Steps per run of LeNet; a tenth of them for ResNet-18.",
)


def rounds(default: int, least: int = 3) -> Any:
    kind = click.IntRange(min=least)
    return common.option("--rounds", type=kind, metavar="N", default=default, show_default=True, help="Runs of each.")


def contexts(note: str) -> Any:
    default = (1, 2, 4, 8)
    help = f"How many CPU contexts; {note}"
    return common.option(
        "--contexts", type=POSITIVE, metavar="N", multiple=True, default=default, show_default=True, help=help
    )


def out(*names: str) -> Any:
    files = " and ".join(f"{name}.json and {name}.png" for name in names)
    return common.option("--out", type=common.FOLDER, metavar="DIR", help=f"A folder for {files}.")


def show(benchmark: ModuleType, name: str, result: dict, folder: str | None) -> None:
    """Print the table of a result and, with --out, write its JSON and picture."""
    from bench import harness

    click.echo(benchmark.table(result))
    if folder is not None:
        harness.leave(folder, name, result, benchmark.draw)
        click.echo(f"picture: {folder}/{name}.png")


@click.group(
    cls=common.Group, examples="python scripts/bench.py steps\npython scripts/bench.py allreduce --out runs/bench"
)
def bench() -> None:
    """Measure speed and memory. Each subcommand prints a table."""


def command(name: str, examples: str) -> Any:
    """A subcommand. examples: its options, one line per example."""
    lines = [f"python scripts/bench.py {name} {options}".rstrip() for options in examples.splitlines()]
    return bench.command(name, cls=common.Command, examples="\n".join(lines))


@command("steps", "\n--rounds 5 --steps 200\n--what engine")
@common.option(
    "--what",
    type=common.Choice(WHAT),
    multiple=True,
    default=("step", "evaluate", "resnet18", "main-job"),
    show_default=True,
    help="step: LeNet's, next to the notebook's code. evaluate: LeNet's evaluation. resnet18: its step. overhead: what "
    "an epoch costs besides computation. engine: without each of the engine's settings. profile: the time of each "
    "operator. main-job: a whole run and its memory.",
)
@rounds(3)
@steps_per_run
def steps_command(what: tuple[str, ...], rounds: int, steps: int) -> None:
    """Time and memory of a step, next to the notebook's code. Each in its own process, in turn."""
    from bench import steps as benchmark

    tables = {
        "step": lambda: benchmark.step_table(benchmark.measure(benchmark.STEP, rounds, steps)),
        "evaluate": lambda: benchmark.speedup_table(benchmark.measure(benchmark.EVALUATE, rounds, steps)),
        "resnet18": lambda: benchmark.speedup_table(benchmark.measure(benchmark.RESNET18, rounds, steps)),
        "overhead": lambda: benchmark.overhead(rounds),
        "engine": lambda: benchmark.engine_table(benchmark.measure(benchmark.ENGINE, rounds, steps)),
        "profile": lambda: benchmark.profile(steps),
        "main-job": benchmark.main_job,
    }
    for name, measured in tables.items():
        if name in what:
            click.echo(measured())


size = common.option(
    "--size",
    type=click.IntRange(min=1, max=46340),
    metavar="M",
    help="M x M float32 matrices; default 4000 on GPUs, 1000 on CPU contexts. With 4000 and 50 products, as in the "
    "notebook, its seconds are shown too.",
)
products = common.option(
    "--products", type=POSITIVE, metavar="N", help="Products per device; default 50 on GPUs, 20 on CPU contexts."
)


@command("async", "\n--gpus 4 --device gpu")
@common.gpus("2")
@common.device
@size
@products
@rounds(5)
@out("async")
def async_command(out: str | None, **options: Any) -> None:
    """When calls return, and when their work is done. Products of matrices on devices one after another, or at once."""
    from bench import asynchrony

    show(asynchrony, "async", asynchrony.run("async", **options), out)


@command("copy", "\n--size 2000 --out runs/bench")
@common.gpus("1", "Measured on the first of these devices.")
@common.device
@size
@products
@rounds(5)
@out("copy")
def copy_command(out: str | None, **options: Any) -> None:
    """Products of matrices and their copies to the host. After all products, or each as soon as it can."""
    from bench import asynchrony

    show(asynchrony, "copy", asynchrony.run("copy", **options), out)


@command("allreduce", "\n--contexts 2 --contexts 4 --out runs/bench")
@contexts("8 need 3.5 GB of memory.")
@rounds(5)
@out("allreduce")
def allreduce_command(contexts: tuple[int, ...], rounds: int, out: str | None) -> None:
    """Sums of arrays over CPU contexts, by size and by way."""
    from bench import allreduce

    show(allreduce, "allreduce", allreduce.run(contexts, rounds), out)


@command("partition", "\n--rounds 5 --out runs/bench")
@rounds(3)
@common.option("--steps", type=click.IntRange(min=10), metavar="N", default=100, show_default=True, help="Per run.")
@out("partition")
def partition_command(rounds: int, steps: int, out: str | None) -> None:
    """The three ways to split LeNet over two devices: time, bytes moved, idle devices."""
    from bench import partition

    show(partition, "partition", partition.run(rounds, steps), out)


@command("scaling", "\n--model lenet --contexts 2 --contexts 16 --out runs/bench")
@models
@contexts("1 is always measured too.")
@rounds(3)
@steps_per_run
@out("scaling")
def scaling_command(
    models: tuple[str, ...], contexts: tuple[int, ...], rounds: int, steps: int, out: str | None
) -> None:
    """Strong and weak scaling over CPU contexts."""
    from bench import scaling

    show(scaling, "scaling", scaling.run(models, contexts, rounds, steps), out)


@command("distributed", "\n--model lenet --rounds 5 --out runs/bench\n--what compression --out runs/bench")
@common.option(
    "--what",
    type=common.Choice(["speed", "compression"]),
    default="speed",
    show_default=True,
    help="compression: bytes sent and accuracy of LeNet on Fashion-MNIST, with and without compressed gradients.",
)
@models
@rounds(3)
@steps_per_run
@common.option("--epochs", type=POSITIVE, metavar="N", default=4, show_default=True, help="For compression.")
@common.option("--limit", type=POSITIVE, metavar="N", help="For compression: train on the first N examples.")
@out("distributed", "compression")
@click.pass_context
def distributed_command(context: click.Context, what: str, rounds: int, out: str | None, **options: Any) -> None:
    """2 processes of 1 context against 1 process of 2 contexts. Over Horovod and MXNet's parameter servers."""
    used, unused = ("models", "steps"), ("epochs", "limit")
    if what == "compression":
        used, unused = unused, used
    for name in unused:
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise UsageError(f"--{name.replace('models', 'model')} does not apply to --what {what}; omit it")
    if what == "speed":
        from bench import distributed as benchmark
    else:
        from bench import compression as benchmark
    result = benchmark.run(rounds=rounds, **{name: options[name] for name in used})
    show(benchmark, "distributed" if what == "speed" else what, result, out)


@command("model", "runs/bench\nruns/bench --out runs/bench")
@click.argument("folder", type=common.FOLDER)
@out("model")
def model_command(folder: str, out: str | None) -> None:
    """Fit a cost model, and predict clusters. It is fitted to what `allreduce --out` and `scaling --out` left in FOLDER."""
    from bench import model

    show(model, "model", model.run(folder), out)


@command("timeline", "\n--impl highlevel --model resnet18 --out runs/bench")
@common.impl
@common.setting("--model", type=common.Choice(MODELS), help="scratch has only lenet.")
@common.option("--contexts", type=POSITIVE, metavar="N", default=2, show_default=True, help="How many CPU contexts.")
@common.option("--batch-size", type=POSITIVE, metavar="N", help="Over all contexts; default 256, for ResNet-18 64.")
@common.option("--steps", type=POSITIVE, metavar="N", default=5, show_default=True, help="Recorded steps.")
@common.option(
    "--out",
    type=common.FOLDER,
    metavar="DIR",
    help="A folder for timeline.json, timeline.png and timeline.trace.json; the trace opens in chrome://tracing and "
    "Perfetto.",
)
def timeline_command(out: str | None, **options: Any) -> None:
    """What each context does during a few steps, from the engine's profile."""
    from bench import timeline

    show(timeline, "timeline", timeline.run(**options, out=out), out)


@command("peers", "\n--model lenet --rounds 9 --out runs/bench\n--model lenet --accuracy")
@models
@rounds(5, least=5)
@steps_per_run
@common.option("--accuracy", is_flag=True, help="Also train LeNet on Fashion-MNIST for 4 epochs with each.")
@out("peers")
def peers_command(out: str | None, **options: Any) -> None:
    """The same network, data and batches here and in PyTorch. On one process, and distributed."""
    from bench import peers

    show(peers, "peers", peers.run(**options), out)
