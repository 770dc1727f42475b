"""`gluon-mgpu check`: compare the step of a lesson on several devices with the same step on one."""

from __future__ import annotations

import click

from gluon_mgpu.check import files
from gluon_mgpu.check.comparison import Claims, verdict
from gluon_mgpu.commands import common
from gluon_mgpu.compat import devices
from gluon_mgpu.runtime import log
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training.config import Config

COMMANDLINE = click.core.ParameterSource.COMMANDLINE
CLAIMS = {
    "start": "all devices start with the same parameters",
    "split": "split_and_load puts each example on exactly one device",
    "sum": "after allreduce, each device has the sum",
    "losses": "the losses are those of the batch's examples",
    "replicas": "after a step, all devices have the same parameters",
    "update": "the step changes the parameters as on one device",
    "repeatable": "the same step twice gives the same result",
}


@common.command(
    examples="""
        gluon-mgpu check my_scratch.py --gpus 4
        gluon-mgpu check highlevel --model resnet18
        gluon-mgpu check my_ddp.py
    """,
)
@click.argument("lesson", metavar="FILE.py|scratch|highlevel")
@common.settings("gpus", "device", "model", gpus={"default": 2})
@click.pass_context
def check(context: click.Context, lesson: str, gpus: tuple[int, ...], device: str, model: str) -> None:
    """Take a few steps with a lesson, on several devices and on one, and compare them claim by claim. FILE.py is your
    changed copy of scratch.py or highlevel.py, or a file with a step in PyTorch (two processes) or JAX (two devices),
    such as docs/pytorch/ddp.py. The exit status is 1 if the steps differ or cannot be compared."""
    if engine := files.engine(lesson):
        _check_file(context, lesson, engine)
    ctx = devices.contexts(gpus, device)
    from gluon_mgpu.training import lessons
    from gluon_mgpu.training.check import compare

    config = Config(impl=lesson, model=model)
    claims = compare(lessons.load(lesson), ctx, config)
    _report(context, lesson, claims, CLAIMS)


def _check_file(context: click.Context, path: str, engine: str) -> None:
    """Check a step in PyTorch or JAX."""
    given = [name for name in ("gpus", "device", "model") if context.get_parameter_source(name) == COMMANDLINE]
    if given:
        raise UsageError(given[0], None, "only for MXNet; PyTorch and JAX are checked on two CPU devices")
    found = files.run(path, engine)
    numbers = found.get("numbers", {})
    if "one" in numbers:
        several, one, bound = (f"{numbers[name]:.1e}" for name in ("several", "one", "bound"))
        click.echo(f"from the same step in float64: two devices {several}, one {one}; rounding explains {bound}")
    _report(context, path, found["claims"], files.CLAIMS)


def _report(context: click.Context, lesson: str, claims: Claims, texts: dict[str, str]) -> None:
    rows = [["no" if reason else "yes", texts[claim], reason] for claim, reason in claims.items()]
    for line in log.table(rows, align="<"):
        click.echo(line)
    difference = verdict(claims)
    click.echo(f"{lesson} {difference or 'takes the same step as on one device'}")
    context.exit(1 if difference else 0)
