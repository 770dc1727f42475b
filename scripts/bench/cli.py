"""scripts/bench.py SUBCOMMAND: a subcommand is its options and one call."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import click
from click.core import ParameterSource

from gluon_mgpu.commands.common import F
from gluon_mgpu.commands.common import common as commands
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training.settings import MODELS

ROUNDS = click.IntRange(min=3)
_models = click.option(
    "--model",
    "models",
    type=commands.Choice(["lenet", "resnet18"]),
    multiple=True,
    default=("lenet", "resnet18"),
    show_default=True,
    help="LeNet at batch 256, ResNet-18 at 64.",
)
_steps = click.option(
    "--steps",
    type=click.IntRange(min=10),
    metavar="N",
    default=100,
    show_default=True,
    help="Steps a run; ResNet-18's: a tenth.",
)


def _contexts(note: str) -> Callable[[F], F]:
    return click.option(
        "--contexts",
        type=click.IntRange(min=1),
        metavar="N",
        multiple=True,
        default=(1, 2, 4, 8),
        show_default=True,
        help=f"How many CPU contexts; {note}",
    )


def _out(name: str) -> Callable[[F], F]:
    return click.option("--out", type=commands.FOLDER, metavar="DIR", help=f"Leave {name}.json and {name}.png there.")


def _show(benchmark: ModuleType, name: str, result: dict, out: str | None) -> None:
    """The table of a result and, with --out, its JSON and picture."""
    from bench import machine

    click.echo(benchmark.table(result))
    if out is not None:
        machine.leave(out, name, result, benchmark.draw)
        click.echo(f"{out}/{name}.png shows it.")


@click.group(
    cls=commands.Group,
    examples="""
        gluon-mgpu bench steps
        gluon-mgpu bench allreduce --out runs/bench
        gluon-mgpu bench steps --help
    """,
)
def bench() -> None:
    """Measure asynchrony, copies, allreduce, scaling, and more. Each subcommand prints a table."""


@bench.command(
    "steps",
    cls=commands.Command,
    examples="""
        gluon-mgpu bench steps
        gluon-mgpu bench steps --rounds 5 --steps 200
        gluon-mgpu bench steps --what engine
    """,
)
@click.option(
    "--what",
    type=commands.Choice(["step", "evaluate", "resnet18", "overhead", "engine", "profile", "main-job"]),
    multiple=True,
    default=("step", "evaluate", "resnet18", "main-job"),
    show_default=True,
    help="step: LeNet's beside the notebook's code. evaluate: LeNet's evaluation. resnet18: its step. overhead: what "
    "of an epoch is not computation. engine: each setting left out in turn. profile: where a step's time goes, "
    "by operator. main-job: a whole run and its memory.",
)
@click.option("--rounds", type=ROUNDS, metavar="N", default=3, show_default=True, help="Runs of each subject.")
@_steps
def steps(what: tuple[str, ...], rounds: int, steps: int) -> None:
    """Time and memory a step, ours and the notebook's code. Each in its own processes, taken in turn."""
    from bench import steps as benchmark

    if "step" in what:
        click.echo(benchmark.step_table(benchmark.measure(benchmark.STEP, rounds, steps)))
    for name, subjects in (("evaluate", benchmark.EVALUATE), ("resnet18", benchmark.RESNET18)):
        if name in what:
            click.echo(benchmark.speedup_table(benchmark.measure(subjects, rounds, steps)))
    if "overhead" in what:
        click.echo(benchmark.overhead())
    if "engine" in what:
        click.echo(benchmark.engine_table(benchmark.measure(benchmark.ENGINE, rounds, steps)))
    if "profile" in what:
        click.echo(benchmark.profile())
    if "main-job" in what:
        printed, peak = benchmark.main_job()
        click.echo(f"The main job, scratch on 2 CPU contexts: peak memory {peak:.0f} MB\n{printed}", nl=False)


def _products(gpus: str) -> Callable[[F], F]:
    """The options of `async` and `copy`."""

    def add(command: F) -> F:
        for option in (
            click.option(
                "--rounds",
                type=ROUNDS,
                metavar="N",
                default=5,
                show_default=True,
                help="After one that does not count.",
            ),
            click.option(
                "--products",
                type=click.IntRange(min=1),
                metavar="N",
                help="Products on each device; default 50 on GPUs, 20 on CPU contexts.",
            ),
            click.option(
                "--size",
                type=click.IntRange(min=1, max=46340),
                metavar="M",
                help="Of M x M float32 matrices; default 4000 on GPUs, 1000 on CPU contexts. 4000 with 50 products is "
                "the notebook's, whose seconds are then shown.",
            ),
            commands.device,
            commands.gpus(gpus),
        ):
            command = option(command)
        return command

    return add


@bench.command(
    "async",
    cls=commands.Command,
    examples="""
        gluon-mgpu bench async
        gluon-mgpu bench async --gpus 4 --device gpu --size 4000 --products 50
    """,
)
@_products("2")
@_out("async")
def asynchronous(out: str | None, **options: Any) -> None:
    """When calls return, and when they are done. Products of matrices, on all devices one after another, or at once."""
    from bench import asynchrony

    _show(asynchrony, "async", asynchrony.run("async", **options), out)


@bench.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu bench copy
        gluon-mgpu bench copy --size 2000 --out runs/bench
    """,
)
@_products("1")
@_out("copy")
def copy(out: str | None, **options: Any) -> None:
    """Products, and the copies of them to the host. Once all are done, or each as soon as it can."""
    from bench import asynchrony

    _show(asynchrony, "copy", asynchrony.run("copy", **options), out)


@bench.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu bench allreduce
        gluon-mgpu bench allreduce --contexts 2 --contexts 4 --out runs/bench
    """,
)
@_contexts("each number in a process of its own. 8 need 3.5 GB.")
@click.option("--rounds", type=ROUNDS, metavar="N", default=5, show_default=True, help="Times each way is measured.")
@_out("allreduce")
def allreduce(contexts: tuple[int, ...], rounds: int, out: str | None) -> None:
    """Sums of arrays over CPU contexts, by size and by way. Beside the memory's own copy rate."""
    from bench import allreduce as benchmark

    _show(benchmark, "allreduce", benchmark.run(contexts, rounds), out)


@bench.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu bench partition
        gluon-mgpu bench partition --rounds 5 --out runs/bench
    """,
)
@click.option("--rounds", type=ROUNDS, metavar="N", default=3, show_default=True, help="Runs of each way.")
@click.option(
    "--steps", type=click.IntRange(min=10), metavar="N", default=100, show_default=True, help="Timed steps a run."
)
@_out("partition")
def partition(rounds: int, steps: int, out: str | None) -> None:
    """The three ways to split LeNet over two devices. Time, bytes moved, devices that wait."""
    from bench import partition as benchmark

    _show(benchmark, "partition", benchmark.run(rounds, steps), out)


@bench.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu bench scaling
        gluon-mgpu bench scaling --model lenet --contexts 2 --contexts 16 --out runs/bench
    """,
)
@_models
@_contexts("1 is always measured too.")
@click.option("--rounds", type=ROUNDS, metavar="N", default=3, show_default=True, help="Runs of each point.")
@_steps
@_out("scaling")
def scaling(models: tuple[str, ...], contexts: tuple[int, ...], rounds: int, steps: int, out: str | None) -> None:
    """Strong and weak scaling over more contexts. With the batch of all of them fixed, and with that of each."""
    from bench import scaling as benchmark

    _show(benchmark, "scaling", benchmark.run(models, contexts, rounds, steps), out)


@bench.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu bench distributed
        gluon-mgpu bench distributed --model lenet --rounds 5 --out runs/bench
        gluon-mgpu bench distributed --what compression --epochs 4 --out runs/bench
    """,
)
@click.option(
    "--what",
    type=commands.Choice(["speed", "compression"]),
    default="speed",
    show_default=True,
    help="compression: bytes sent and accuracy of LeNet on Fashion-MNIST, with and without it.",
)
@_models
@click.option(
    "--rounds", type=ROUNDS, metavar="N", default=3, show_default=True, help="Runs of each way; compression's seeds."
)
@_steps
@click.option("--epochs", type=click.IntRange(min=1), metavar="N", default=4, show_default=True, help="compression's.")
@click.option(
    "--limit", type=click.IntRange(min=1, max=60000), metavar="N", help="compression's: the first N examples."
)
@click.option(
    "--out", type=commands.FOLDER, metavar="DIR", help="Leave distributed.json, or compression.json, and .png."
)
@click.pass_context
def distributed(
    context: click.Context,
    what: str,
    models: tuple[str, ...],
    rounds: int,
    steps: int,
    epochs: int,
    limit: int | None,
    out: str | None,
) -> None:
    """2 processes of 1 context against 1 process of 2. Over Horovod and MXNet's parameter servers."""
    for name in ("epochs", "limit") if what == "speed" else ("models", "steps"):
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            other = "compression" if what == "speed" else "speed"
            raise UsageError(f"--{name.replace('models', 'model')} --what {what}: it is for --what {other} only")
    if what == "speed":
        from bench import distributed as benchmark

        _show(benchmark, "distributed", benchmark.run(models, rounds, steps), out)
    else:
        from bench import compression

        _show(compression, "compression", compression.run(rounds, epochs, limit), out)


@bench.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu bench allreduce --out runs/bench && gluon-mgpu bench scaling --out runs/bench
        gluon-mgpu bench model runs/bench
        gluon-mgpu bench model runs/bench --out runs/bench
    """,
)
@click.argument("folder", type=commands.FOLDER)
@_out("model")
def model(folder: str, out: str | None) -> None:
    """A cost model, and what it predicts for clusters. Fitted to what `allreduce` and `scaling` left in FOLDER; with
    what `distributed` left there, held against steps of 2 processes too."""
    from bench import model as benchmark

    _show(benchmark, "model", benchmark.run(folder), out)


@bench.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu bench timeline
        gluon-mgpu bench timeline --impl highlevel --model resnet18 --out runs/bench
    """,
)
@commands.impl
@commands.setting("--model", kind=commands.Choice(MODELS), help="All but lenet are highlevel's.")
@click.option("--contexts", type=click.IntRange(min=1), metavar="N", default=2, show_default=True, help="CPU contexts.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Examples a step, over all contexts together; default 256, ResNet-18's 64.",
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", default=5, show_default=True, help="Steps shown.")
@click.option(
    "--out",
    type=commands.FOLDER,
    metavar="DIR",
    help="Leave timeline.json, timeline.png and timeline.trace.json there; the last opens in chrome://tracing and "
    "Perfetto.",
)
def timeline(out: str | None, **options: Any) -> None:
    """What each context does in a few steps. By the engine's profile: forward, backward, allreduce, update, idle."""
    from bench import timeline as benchmark

    _show(benchmark, "timeline", benchmark.run(**options, out=out), out)


@bench.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu bench peers
        gluon-mgpu bench peers --model lenet --rounds 9 --out runs/bench
        gluon-mgpu bench peers --model lenet --accuracy
    """,
)
@_models
@click.option(
    "--rounds", type=click.IntRange(min=5), metavar="N", default=5, show_default=True, help="Runs of each subject."
)
@_steps
@click.option("--accuracy", is_flag=True, help="Train LeNet on Fashion-MNIST for 4 epochs with each too.")
@_out("peers")
def peers(out: str | None, **options: Any) -> None:
    """The same network, data and batch here and in PyTorch. Alone and distributed, on the same cores."""
    from bench import peers as benchmark

    _show(benchmark, "peers", benchmark.run(**options), out)
