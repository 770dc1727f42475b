"""`gluon-mgpu check`: compare the step of a lesson on several devices with the same step on one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from gluon_mgpu import check as checks
from gluon_mgpu.check.driver import UNITS
from gluon_mgpu.check.judge import Report
from gluon_mgpu.commands import common
from gluon_mgpu.compat import devices
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import UsageError, setting
from gluon_mgpu.support.params import FloatRange
from gluon_mgpu.training.config import Config, Numbers

OF_STEP = ("model", "hybridize", "tune")  # settings
OF_LESSONS = (*OF_STEP, "gpus", "device", "dataset", "data_dir")  # settings for MXNet only
OWN = {"default": None, "type": click.Choice(["own"]), "help": "own: take the shape and the classes of your own data."}
DEVICES = {"default": None, "help": "Number of devices, or their indices. Default: 2, and then 3."}
OF_FILES = ("processes", "seconds")  # options for PyTorch and JAX only
CLAIMS = {
    "runs": "a step runs on one {unit}",
    "compared": "the steps can be compared",
    "repeatable": "the same step twice gives the same result",
    "several": "a step runs on several {units}",
    "start": "all {units} start with the same parameters",
    "devices": "each example is on exactly one {unit}",
    "called": "the step calls the functions of this file",
    "sum": "each {unit} updates with the sum of all gradients",
    "losses": "the losses are those of the batch's examples",
    "replicas": "after a step, all {units} have the same parameters",
    "update": "the step changes the parameters as on one {unit}",
    "accuracy": "evaluate_accuracy counts each example once",
}


@common.command(
    examples="""
        gluon-mgpu check my_scratch.py --gpus 4
        gluon-mgpu check highlevel --model resnet18
        gluon-mgpu check my_ddp.py --processes 2,3 --even
    """,
)
@click.argument("impl", metavar="FILE.py|scratch|highlevel")
@common.option(
    "--processes",
    type=Numbers(click.IntRange(2)),
    default=(2, 3),
    help="PyTorch's processes or JAX's devices.",
    metavar="K,...",
)
@common.option("--steps", type=click.IntRange(1), default=3, help="Steps with even batches, before an uneven one.")
@common.option("--even", is_flag=True, help="Only warn if uneven batches differ.")
@common.option(
    "--seconds",
    type=FloatRange(1),
    default=60,
    help="Time limit for a step.",
)
@common.settings(*OF_LESSONS, gpus=DEVICES, dataset=OWN)
@click.pass_context
def check(context: click.Context, impl: str, processes: Sequence[int], seconds: float, **options: Any) -> None:
    """Take a few steps on several devices and on one, and compare them claim by claim. FILE.py is your changed copy of
    scratch.py or highlevel.py, or a file with a step in PyTorch (in processes) or JAX (on devices of one process), such
    as docs/pytorch/ddp.py. Exit status: 0 if the steps are the same, 1 if they differ, 3 if they cannot be compared.

    The images are random. With --dataset own, they have the shape and the classes of your data."""
    steps, even, framework = options.pop("steps"), options.pop("even"), checks.framework(impl)
    for name in OF_LESSONS if framework else OF_FILES:
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            raise UsageError(name, None, f"only for {'MXNet' if framework else 'PyTorch and JAX'}")
    if framework:
        _print_and_exit(context, impl, checks.compare_file(impl, processes, steps, even, seconds))
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # before MXNet loads; with TF32, sums on GPUs differ by 1e-3
    if options["data_dir"] is not None and options["dataset"] != "own":
        raise UsageError("data_dir", options["data_dir"], f"needs {setting('dataset', 'own')}: other images are random")
    ctx = devices.contexts(options["gpus"] or max(processes), options["device"])
    from gluon_mgpu.check.mxnet import compare_lesson
    from gluon_mgpu.data import datasets

    shape, classes = datasets.IMAGE_SHAPE, 10
    if options["dataset"]:
        own = datasets.load("own", options["data_dir"])
        shape, classes = own.image_shape, own.classes
    config = Config(impl=impl, **{name: options[name] for name in OF_STEP})
    _print_and_exit(
        context,
        impl,
        compare_lesson(impl, ctx, config, shape, classes, steps, even, [len(ctx)] if options["gpus"] else processes),
    )


def _print_and_exit(context: click.Context, file: str, report: Report) -> NoReturn:
    words = {"unit": report.unit, "units": UNITS[report.unit]}
    rows = [["no" if r else "yes", CLAIMS[claim].format(**words), r] for claim, r in report.claims.items()]
    for line in [*log.table(rows, align="<"), *report.notes, f"{file} {report.line}"]:
        click.echo(line)
    context.exit(report.status)
