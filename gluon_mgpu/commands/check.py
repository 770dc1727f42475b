"""`gluon-mgpu check`: compare the step of a lesson on several devices with the same step on one."""

from __future__ import annotations

import click

from gluon_mgpu.commands import common
from gluon_mgpu.compat import devices
from gluon_mgpu.runtime import log
from gluon_mgpu.training.config import Config

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
    """,
)
@click.argument("lesson", metavar="FILE.py|scratch|highlevel")
@common.settings("gpus", "device", "model", gpus={"default": 2})
@click.pass_context
def check(context: click.Context, lesson: str, gpus: tuple[int, ...], device: str, model: str) -> None:
    """Take a few steps with a lesson, on several devices and on one, and compare them claim by claim. FILE.py is your
    changed copy of scratch.py or highlevel.py. The exit status is 1 if the steps differ or cannot be compared."""
    ctx = devices.contexts(gpus, device)
    from gluon_mgpu.check.comparison import verdict
    from gluon_mgpu.training import lessons
    from gluon_mgpu.training.check import compare

    config = Config(impl=lesson, model=model)
    claims = compare(lessons.load(lesson), ctx, config)
    rows = [["no" if reason else "yes", CLAIMS[claim], reason] for claim, reason in claims.items()]
    for line in log.table(rows, align="<"):
        click.echo(line)
    difference = verdict(claims)
    click.echo(f"{lesson} {difference or 'takes the same step as on one device'}")
    context.exit(1 if difference else 0)
