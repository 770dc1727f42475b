"""scripts/bench.py SUBCOMMAND: a subcommand is its options and one call."""

import click

from gluon_mgpu import commands


@click.group(cls=commands.Group)
def bench():
    """Measure. Each subcommand prints a table."""


@bench.command(
    "steps",
    cls=commands.Command,
    epilog="""\b
Examples:
  bench.py steps
  bench.py steps --rounds 5 --steps 200
  bench.py steps --what engine""",
)
@click.option(
    "--what",
    type=click.Choice(["step", "evaluate", "resnet18", "overhead", "engine", "profile", "main-job"]),
    multiple=True,
    default=("step", "evaluate", "resnet18", "main-job"),
    show_default=True,
    help="step: LeNet's beside the notebook's code. evaluate: LeNet's evaluation. resnet18: its step. overhead: what "
    "the bar and the folder of a run cost. engine: each setting left out in turn. profile: where a step's time goes, "
    "by operator. main-job: a whole run and its memory.",
)
@click.option("--rounds", type=click.IntRange(min=3), default=3, show_default=True, help="Runs of each subject.")
@click.option(
    "--steps", type=click.IntRange(min=10), default=100, show_default=True, help="Steps a run; ResNet-18's: a tenth."
)
def steps(what, rounds, steps):
    """Time and memory a step, ours and the notebook's code, each in its own processes, taken in turn."""
    from gluon_mgpu.bench import steps as benchmark

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
