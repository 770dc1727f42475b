"""`gluon-mgpu check`: compare the step of a lesson on several devices with the same step on one."""

from __future__ import annotations

import os
from typing import Any

import click

from gluon_mgpu.check import frameworks
from gluon_mgpu.check.comparison import Report
from gluon_mgpu.commands import common
from gluon_mgpu.compat import devices
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import UsageError, setting
from gluon_mgpu.training.config import Config

SETTINGS = ("model", "hybridize", "tune", "zero")  # of the step
CLAIMS = {
    "runs": "a step runs on one device",
    "several": "a step runs on several devices",
    "start": "all devices start with the same parameters",
    "devices": "each device has its own replica, and computes its shard",
    "called": "the step calls the functions of this file",
    "split": "split_and_load puts each example on exactly one device",
    "sum": "after allreduce, each device has the sum",
    "losses": "the losses are those of the batch's examples",
    "replicas": "after a step, all devices have the same parameters",
    "update": "the parameters on the first device change as on one device",
    "accuracy": "evaluate_accuracy counts each example once",
    "repeatable": "the same step twice gives the same result",
}


@common.command(
    examples="""
        gluon-mgpu check my_scratch.py --gpus 4
        gluon-mgpu check highlevel --model resnet18
        gluon-mgpu check sharded --zero 3
        gluon-mgpu check my_ddp.py
    """,
)
@click.argument("lesson", metavar="FILE.py|scratch|highlevel|sharded")
@common.settings(*SETTINGS, "gpus", "device", "dataset", "data_dir", gpus={"default": 2}, dataset={"default": None})
@click.pass_context
def check(context: click.Context, lesson: str, **options: Any) -> None:
    """Take a few steps with a lesson, on several devices and on one, and compare them claim by claim. FILE.py is your
    changed copy of scratch.py or highlevel.py, or a file with a step in PyTorch (two processes) or JAX (two devices),
    such as docs/pytorch/ddp.py. The exit status is 1 if the steps differ or cannot be compared.

    The images are random. With --dataset own, they have the shape and the classes of your data."""
    if framework := frameworks.framework(lesson):
        _check_file(context, lesson, framework)
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # before MXNet loads; with TF32, sums on GPUs differ by 1e-3
    if options["data_dir"] is not None and options["dataset"] != "own":
        raise UsageError("data_dir", options["data_dir"], f"needs {setting('dataset', 'own')}: other images are random")
    ctx = devices.contexts(options["gpus"], options["device"])
    from gluon_mgpu.data import datasets
    from gluon_mgpu.training import lessons
    from gluon_mgpu.training.check import compare

    shape, classes = datasets.IMAGE_SHAPE, 10
    if options["dataset"] == "own":  # the others have the same shape and number of classes
        own = datasets.load("own", options["data_dir"])
        shape, classes = own.image_shape, own.classes
    config = Config(impl=lesson, **{name: options[name] for name in SETTINGS})
    report = compare(lessons.load(lesson), ctx, config, shape, classes)
    _print(context, lesson, report, CLAIMS)


def _check_file(context: click.Context, path: str, framework: str) -> None:
    """Check a step in PyTorch or JAX."""
    for name in context.params:
        if name != "lesson" and context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise UsageError(name, None, "only for MXNet; PyTorch and JAX are checked on two CPU devices")
    _print(context, path, frameworks.run(path, framework), frameworks.CLAIMS)


def _print(context: click.Context, lesson: str, report: Report, texts: dict[str, str]) -> None:
    answers = {None: "not called", "": "yes"}
    rows = [[answers.get(reason, "no"), texts[claim], reason or ""] for claim, reason in report.claims.items()]
    for line in [*log.table(rows, align="<"), *report.notes, f"{lesson} {report.line}"]:
        click.echo(line)
    context.exit(1 if report.verdict else 0)
