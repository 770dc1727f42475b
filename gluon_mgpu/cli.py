"""The command line: options and one call. Exit status 0; 1 a run failed; 2 the command was wrong; 130 interrupted."""

import importlib
import sys
import traceback

import click

from gluon_mgpu import __version__, datasets, devices, engine
from gluon_mgpu.errors import Error, UsageError


class OneLineErrors:
    """Ends with one line and the right exit status instead of a traceback, which --debug shows."""

    def main(self, *args, **kwargs):
        debug = "--debug" in (kwargs.get("args") or (args and args[0]) or sys.argv[1:])
        try:
            super().main(*args, **{**kwargs, "standalone_mode": False})
            status = 0
        except (Exception, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            status = _report(error)
        sys.exit(status)


class Command(OneLineErrors, click.Command):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))


class Group(OneLineErrors, click.Group):
    pass


def _report(error):
    """One line on standard error; returns the exit status."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        click.echo("interrupted", err=True)
        return 130
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, Error):
        click.echo(f"error: {error}", err=True)
        return error.exit_status
    lines = str(error).strip().splitlines() or [""]
    click.echo(f"error: {type(error).__name__}: {lines[-1]} (--debug shows where)", err=True)
    return 1


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  train.py --impl scratch --gpus 2
  train.py --impl highlevel --gpus 0,2 --device gpu
  train.py --impl highlevel --gpus 4 --seed 1 --out runs/first""",
)
@click.option(
    "--impl",
    type=click.Choice(["scratch", "highlevel"]),
    default="scratch",
    show_default=True,
    help="NDArray alone, or Gluon.",
)
@click.option("--dataset", type=click.Choice(datasets.NAMES), default="fashion-mnist", show_default=True)
@click.option("--gpus", default="1", show_default=True, metavar="N|I,J,...", help="How many devices, or which.")
@click.option(
    "--device",
    type=click.Choice(devices.DEVICES),
    default="auto",
    show_default=True,
    help="auto: GPUs where there are any, else as many CPU contexts.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Examples a step, over all devices together.",
)
@click.option("--lr", type=float, default=0.2, show_default=True, help="Learning rate.")
@click.option("--epochs", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--seed", type=click.IntRange(min=0, max=2**31 - 1), help="Makes a run on CPU repeatable bit for bit.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Train on the first N examples, evaluate on the first N/6 of the test set (at least 100).",
)
@click.option(
    "--data-dir",
    type=click.Path(),
    metavar="DIR",
    help="Where the data is; else GLUON_MGPU_DATA, the usual folders, a download.",
)
@click.option(
    "--out",
    type=click.Path(),
    metavar="DIR",
    help="Leave config.json, metrics.jsonl, curves.png and checkpoint.npz there.",
)
@click.option(
    "--hybridize/--no-hybridize",
    default=None,
    help="highlevel: run the net as one graph (default), or operator by operator.",
)
@click.version_option(__version__)
def train(impl, gpus, device, batch_size, lr, hybridize, **settings):
    """Train LeNet with data parallelism; prints time and test accuracy after each epoch."""
    if not 1e-37 < lr < 1e38:  # what float32 can hold; nan is neither
        raise UsageError(f"--lr {lr}: give a number above 0, such as 0.2")
    if impl == "scratch" and hybridize is not None:
        raise UsageError("--hybridize and --no-hybridize are highlevel's: scratch has no graph to run")
    options = {"hybridize": hybridize is not False} if impl == "highlevel" else {}
    indices = devices.parse(gpus)
    engine.configure(len(indices))  # before the implementation imports mxnet
    implementation = importlib.import_module(f"gluon_mgpu.{impl}")
    implementation.train(indices, batch_size, lr, device=device, **options, **settings)


@click.group(cls=Group)
@click.version_option(__version__)
def main():
    """Data-parallel training with MXNet, from scratch and with Gluon."""


main.add_command(train)


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  bench.py
  bench.py --rounds 5 --steps 200
  bench.py --what engine""",
)
@click.option(
    "--what",
    type=click.Choice(["step", "engine", "profile", "main-job"]),
    multiple=True,
    default=("step", "main-job"),
    show_default=True,
    help="step: beside the notebook's code. engine: each setting left out in turn. profile: where a step's time goes, "
    "by operator. main-job: a whole run and its memory.",
)
@click.option("--rounds", type=click.IntRange(min=3), default=3, show_default=True, help="Runs of each subject.")
@click.option("--steps", type=click.IntRange(min=10), default=100, show_default=True, help="Steps a run.")
def bench(what, rounds, steps):
    """Time and memory a step, ours and the notebook's code, each in its own processes, taken in turn."""
    from gluon_mgpu import bench as benchmark

    if "step" in what:
        click.echo(benchmark.step_table(benchmark.measure(benchmark.STEP, rounds, steps)))
    if "engine" in what:
        click.echo(benchmark.engine_table(benchmark.measure(benchmark.ENGINE, rounds, steps)))
    if "profile" in what:
        click.echo(benchmark.profile())
    if "main-job" in what:
        printed, peak = benchmark.main_job()
        click.echo(f"The main job, scratch on 2 CPU contexts: peak memory {peak:.0f} MB\n{printed}", nl=False)


main.add_command(bench)
