"""`gluon-mgpu train`: train a network on one or several devices."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gluon_mgpu import __version__
from gluon_mgpu.commands import common
from gluon_mgpu.distributed import process, serve
from gluon_mgpu.distributed.launch import RESTARTED
from gluon_mgpu.runtime import devices, engine, log
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import datasets, recipes, records, settings

HIGHLEVEL_ONLY = ("hybridize", "tune")
FRACTION = click.FloatRange(0, 1, max_open=True)
FACTOR = click.FloatRange(0, 1, min_open=True, max_open=True)


def numbers(kind: type, *words: str) -> Callable[[Any], Any]:
    """Create an option type that accepts comma-separated numbers, returned as a tuple, or one of the given words."""

    def parse(value: Any) -> Any:
        if isinstance(value, tuple) or value in words:  # a default is already a tuple
            return value
        try:
            return tuple(kind(part) for part in value.split(","))
        except ValueError:
            forms = " or ".join(["a list of numbers separated by commas", *words])
            raise click.BadParameter(f"{value!r} is not {forms}") from None

    return parse


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu train --impl scratch --gpus 2
        gluon-mgpu train --impl highlevel --gpus 0,2 --device gpu
        gluon-mgpu train --recipe gluon-lenet-mnist-4gpu
        gluon-mgpu train --impl highlevel --model resnet18 --gpus 2 --lr 0.1 --momentum 0.9 --schedule cosine
        gluon-mgpu train --impl highlevel --gpus 4 --seed 1 --out runs/first
        gluon-mgpu train --resume runs/first --epochs 10
    """,
)
@common.option(
    "--recipe",
    type=click.Choice(tuple(recipes.RECIPES)),
    metavar="NAME",
    help="Run one of the notebooks' experiments; see --list-recipes. Other options override the recipe's values.",
)
@click.option("--list-recipes", is_flag=True, help="Print the recipes with their options and sources.")
@common.impl
@common.setting(
    "--model", type=click.Choice(settings.MODELS), help="scratch supports only lenet. lenet-max uses max pooling."
)
@common.setting("--dataset", type=click.Choice(datasets.NAMES), help="synthetic needs no files.")
@common.gpus()
@common.device
@common.option(
    "--kvstore",
    type=click.Choice(process.KVSTORES),
    default="local",
    help="Sum gradients in this process (local), with Horovod (start it with horovodrun), or with MXNet's parameter "
    "servers (start them with the launch command). See docs/distributed.md.",
)
@common.option(
    "--compress",
    metavar="fp16|2bit:T",
    shell_complete=lambda *args: [word for word in ("fp16", "2bit:0.5") if word.startswith(args[-1])],
    help="Send gradients as 16-bit numbers (requires --kvstore horovod), or as 2-bit numbers with threshold T "
    "(requires --kvstore dist_sync).",
)
@common.setting("--batch-size", type=common.COUNT, metavar="N", help="Examples per step, across all devices.")
@common.setting(
    "--shares",
    type=numbers(float, "auto"),
    metavar="A,B,...|auto",
    help="Split each batch between unequal devices in this ratio, such as 80,20. auto measures the devices' speeds.",
)
@common.setting("--lr", type=common.POSITIVE, metavar="X", help="Learning rate.")
@common.setting("--scale-lr", is_flag=True, help="Multiply --lr by batch size / 256.")
@common.setting(
    "--schedule",
    type=click.Choice(settings.SCHEDULES),
    help="constant; step: multiply the learning rate by --step-factor after each epoch in --step-epochs; cosine: "
    "decrease it to 0.",
)
@common.setting(
    "--step-epochs",
    "milestones",
    type=numbers(int),
    metavar="E,F,...",
    help="Epochs after which --schedule step changes the learning rate.",
)
@common.setting("--step-factor", "gamma", type=FACTOR, metavar="X", help="Factor for --schedule step.")
@common.setting(
    "--warmup-epochs",
    type=click.FloatRange(min=0),
    metavar="X",
    help="Increase the learning rate from 0 during the first X epochs. X must be less than --epochs.",
)
@common.setting("--momentum", type=FRACTION, metavar="X", help="SGD momentum, such as 0.9.")
@common.setting("--weight-decay", type=FRACTION, metavar="X", help="Weight decay for all parameters, such as 0.0005.")
@common.setting(
    "--clip-norm", "max_grad_norm", type=common.POSITIVE, metavar="X", help="Limit the norm of the gradient to X."
)
@common.setting(
    "--accumulate",
    "grad_accum_steps",
    type=common.COUNT,
    metavar="K",
    help="Compute the gradient of each batch in K parts, to save memory.",
)
@common.setting("--epochs", type=common.COUNT, metavar="N", help="Number of passes through the training set.")
@common.setting(
    "--seed",
    type=common.SEED,
    metavar="N",
    help="Seed for the initial parameters, shuffling and synthetic data. On CPU, runs with the same seed are "
    "bit-for-bit identical. Default: a random seed.",
)
@common.limit
@common.data_dir
@common.out("Write config.json, metrics.jsonl, curves.png and checkpoint.npz to this folder.")
@common.option(
    "--resume",
    type=common.FOLDER,
    metavar="DIR",
    help="Continue the run in this folder with its saved settings. Only --epochs (except with a cosine schedule), "
    "--shares, and options for devices and implementations can be changed.",
)
@click.option("--tensorboard", is_flag=True, help="Also write logs for TensorBoard to the run's folder.")
@click.option("--verbose", is_flag=True, help="Print all settings, as in config.json, and the plan that --tune uses.")
@common.option(
    "--profile",
    type=common.FILE,
    metavar="FILE",
    help="Record what each device does during a few steps, for chrome://tracing or Perfetto. Also draw the "
    "recording as a PNG image next to FILE.",
)
@click.option(
    "--hybridize/--no-hybridize",
    default=True,
    help="With highlevel, --hybridize runs the network as one graph, and --no-hybridize operator by operator.",
)
@click.option(
    "--tune/--no-tune",
    default=True,
    help="With highlevel on CPU, --tune uses faster operators that compute the same values up to rounding, and "
    "--no-tune runs the network as written. The first run on a machine measures which operators are the fastest; "
    "with several workers, the network's own operators are used.",
)
@click.version_option(__version__)
@click.pass_context
def train(context: click.Context, recipe: str | None, list_recipes: bool, **options: Any) -> None:
    """Train LeNet or ResNet-18 with data parallelism, and print the time and test accuracy after each epoch."""
    if list_recipes:
        click.echo(recipes.table())
        return
    given = {name for name in options if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    here = process.require(options["kvstore"])
    if here.role != "worker":
        serve.serve(here)
        return
    process.check_compress(options["compress"], here)
    if os.environ.get(RESTARTED) and options["out"] and records.exists(options["out"]):
        if options["profile"]:
            log.say("--profile is ignored, because the run has been restarted")
        options.update(resume=options["out"], out=None, profile=None)
        recipe, given = None, set()
    if recipe and options["resume"] is not None:
        raise UsageError("--recipe and --resume cannot be combined: a resumed run has its own settings")
    if recipe:
        options.update({k: v for k, v in recipes.RECIPES[recipe].options.items() if k not in given})
    if options["resume"] and (here.rank == 0 or Path(options["resume"]).is_dir()):
        options.update(of_resumed_run(options, given, here))
    settings.Settings(**{name: options[name] for name in settings.NAMES})  # check settings before MXNet is imported
    impl, gpus, batch_size, lr = (options.pop(name) for name in ("impl", "gpus", "batch_size", "lr"))
    if impl == "scratch":
        for name in HIGHLEVEL_ONLY:
            if name in given:
                raise UsageError(f"--{name} and --no-{name} need --impl highlevel")
            del options[name]
    indices = devices.parse(gpus)
    engine.configure(len(indices))  # before the implementation imports mxnet
    importlib.import_module(f"gluon_mgpu.{impl}").train(indices, batch_size, lr, **options)


def of_resumed_run(options: dict[str, Any], given: set[str], here: process.Process) -> dict[str, Any]:
    """The options of the run in the folder options["resume"], except those set on the command line."""
    of_run = records.options(options["resume"])
    kept = {name: value for name, value in of_run.items() if name not in given}
    gpus = kept.get("gpus", options["gpus"])
    other_devices = here.workers > 1 or len(devices.parse(gpus)) != len(of_run["gpus"])
    if other_devices and "shares" not in given:
        kept["shares"] = None
    return kept
