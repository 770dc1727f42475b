"""The command line: a command is its options and one call."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from gluon_mgpu import __version__
from gluon_mgpu.commands.common import common as commands
from gluon_mgpu.commands.doctor import doctor
from gluon_mgpu.distributed import launch as launcher
from gluon_mgpu.distributed import process as place
from gluon_mgpu.distributed import serve
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import datasets, recipes, records
from gluon_mgpu.training.settings import MODELS, SCHEDULES, Settings

SEED = click.IntRange(0, 2**31 - 1)
PROCESSES = click.IntRange(1, launcher.MOST)


class Numbers(click.ParamType):
    """Numbers with commas between them, or one of the words."""

    def __init__(self, kind: type, *words: str) -> None:
        self.kind, self.words, self.name = kind, words, "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple) or value in self.words:
            return value
        try:
            return tuple(self.kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value}: give numbers with commas between them{''.join(f', or {w}' for w in self.words)}")


class Seeds(click.ParamType):
    """3 is the seeds 1, 2 and 3; 4,7 is these two."""

    name = "seeds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        many = value.partition(",")[1]
        try:
            numbers = [int(part) for part in value.removesuffix(",").split(",")]
        except ValueError:
            numbers = []
        if (
            not numbers
            or not all(1 - bool(many) <= number < 2**31 for number in numbers)
            or len({*numbers}) < len(numbers)
        ):
            self.fail(f"{value}: give how many seeds (3) or which ones (4,7)")
        return tuple(numbers) if many else tuple(range(1, numbers[0] + 1))


def _list_recipes(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        click.echo(recipes.table())
        ctx.exit()


@click.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu train --impl scratch --gpus 2
        gluon-mgpu train --impl highlevel --gpus 0,2 --device gpu
        gluon-mgpu train --recipe gluon-lenet-mnist-4gpu
        gluon-mgpu train --impl highlevel --model resnet18 --gpus 2 --lr 0.1 --momentum 0.9 --schedule cosine
        gluon-mgpu train --impl highlevel --gpus 4 --seed 1 --out runs/first
        gluon-mgpu train --resume runs/first --epochs 10
    """,
)
@click.option(
    "--recipe",
    type=commands.Choice(tuple(recipes.RECIPES)),
    metavar="NAME",
    help="One of the notebooks' experiments, as --list-recipes names them. Options given beside it win.",
)
@click.option(
    "--list-recipes",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_recipes,
    help="Print the recipes, with their options and sources.",
)
@commands.impl
@commands.setting(
    "--model", kind=commands.Choice(MODELS), help="lenet-max has max pooling; all but lenet are highlevel's."
)
@commands.setting("--dataset", kind=commands.Choice(datasets.NAMES), help="synthetic needs no file.")
@commands.gpus()
@commands.device
@click.option(
    "--kvstore",
    type=commands.Choice(place.KVSTORES),
    default="local",
    show_default=True,
    help="What sums gradients: this process, Horovod (start it with horovodrun), or MXNet's parameter servers (start "
    "it with launch.py); docs/distributed.md.",
)
@click.option(
    "--compress",
    metavar="fp16|2bit:T",
    shell_complete=lambda context, param, begun: [way for way in ("fp16", "2bit:0.5") if way.startswith(begun)],
    help="Send gradients as 16-bit numbers (horovod), or in 2 bits: above T, below -T, or nothing, and the rest with a "
    "later step (dist_sync).",
)
@commands.setting(
    "--batch-size", kind=int, metavar="N", values="x>=1", help="Examples a step, over all devices together."
)
@commands.setting(
    "--shares", kind=Numbers(float, "auto"), metavar="A,B,...|auto", help="Parts of a batch for unequal devices: 80,20."
)
@commands.setting("--lr", kind=float, metavar="X", values="x>0", help="Learning rate.")
@commands.setting("--scale-lr", kind=bool, flag=True, help="--lr is for a batch of 256: scale it to this one.")
@commands.setting(
    "--schedule",
    kind=commands.Choice(SCHEDULES),
    help="How the learning rate goes on: as it is, smaller after --step-epochs, or down to 0 along a cosine.",
)
@commands.setting(
    "--step-epochs",
    kind=Numbers(int),
    metavar="E,F,...",
    values="1<=x<epochs",
    help="After which epochs --schedule step steps.",
)
@commands.setting(
    "--step-factor",
    kind=float,
    metavar="X",
    values="0<x<1",
    help="What --schedule step multiplies the learning rate by.",
)
@commands.setting(
    "--warmup-epochs",
    kind=float,
    metavar="X",
    values="0<=x<epochs",
    help="The learning rate first grows from 0 for so long.",
)
@commands.setting(
    "--momentum",
    kind=float,
    metavar="X",
    values="0<=x<1",
    help="Part of the last update that the next one repeats, such as 0.9.",
)
@commands.setting(
    "--weight-decay",
    kind=float,
    metavar="X",
    values="0<=x<1",
    help="Part of every parameter that is taken off a step, times --lr.",
)
@commands.setting(
    "--clip-norm", kind=float, metavar="NORM", values="x>0", help="Scale a gradient of a larger norm down to this one."
)
@commands.setting(
    "--accumulate",
    kind=int,
    values="1<=x<=batch-size",
    metavar="K",
    help="Compute a batch's gradient in K pieces: needs less memory.",
)
@commands.setting("--epochs", kind=int, metavar="N", values="x>=1", help="How often to go through the training set.")
@commands.setting(
    "--seed",
    kind=int,
    values="0<=x<=2147483647",
    metavar="N",
    help="Makes a run on CPU repeatable bit for bit; else one is drawn.",
)
@commands.setting(
    "--limit",
    kind=int,
    values="x>=1",
    metavar="N",
    help="Train on the first N examples, evaluate on the first N/6 of the test set (at least 100).",
)
@commands.data_dir
@click.option(
    "--out",
    type=commands.FOLDER,
    metavar="DIR",
    help="Leave config.json, metrics.jsonl, curves.png and checkpoint.npz there.",
)
@click.option(
    "--resume",
    type=commands.FOLDER,
    metavar="DIR",
    help="Go on with a run from its checkpoint, with its own settings; other --gpus, --shares or --impl may be given, "
    "and other --epochs, but to a cosine schedule.",
)
@click.option("--tensorboard", is_flag=True, help="Write for TensorBoard too, into the run's folder.")
@click.option(
    "--profile",
    type=commands.FILE,
    metavar="FILE",
    help="Record what each device does during 5 steps, for chrome://tracing or Perfetto, and draw it beside FILE as "
    ".png. The epoch that they are in takes a little longer.",
)
@click.option(
    "--hybridize/--no-hybridize",
    default=True,
    show_default=True,
    help="highlevel: run the net as one graph, or operator by operator.",
)
@click.version_option(__version__)
@click.pass_context
def train(context: click.Context, recipe: str | None, **options: Any) -> None:
    """Train LeNet or ResNet-18 with data parallelism. Prints time and test accuracy after each epoch."""
    given = {name for name in options if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    here = place.asked(options["kvstore"])
    if here.role != "worker":
        serve.serve(here)
        return
    place.check_compress(options["compress"], here)
    if recipe and options["resume"] is not None:
        raise UsageError("--recipe and --resume: a resumed run has its own settings")
    if recipe:
        options.update({k: v for k, v in recipes.RECIPES[recipe].options.items() if k not in given})
    if options["resume"] and (here.rank == 0 or Path(options["resume"]).is_dir()):
        of_run = records.options(options["resume"])
        options.update({k: v for k, v in of_run.items() if k not in given})
        others = here.workers > 1 or len(devices.parse(options["gpus"])) != len(of_run["gpus"])
        if "shares" not in given and others:
            options["shares"] = None
    Settings(**{name: options[name] for name in records.SETTINGS})  # refuses before anything is imported
    impl, gpus, batch_size, lr = (options.pop(name) for name in ("impl", "gpus", "batch_size", "lr"))
    if impl == "scratch":
        if "hybridize" in given:
            raise UsageError("--hybridize and --no-hybridize are highlevel's: scratch has no graph to run")
        del options["hybridize"]
    indices = devices.parse(gpus)
    engine.configure(len(indices))  # before the implementation imports mxnet
    implementation = importlib.import_module(f"gluon_mgpu.{impl}")
    implementation.train(indices, batch_size, lr, **options)


@click.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu batch-size
        gluon-mgpu batch-size --impl highlevel --epochs 10 --out runs/batch-size-10
        gluon-mgpu batch-size --dataset synthetic --limit 12000
    """,
)
@commands.impl
@commands.setting("--dataset", kind=commands.Choice(datasets.NAMES), help="synthetic needs no file.")
@commands.device
@commands.setting("--lr", kind=float, metavar="X", values="x>0", help="Learning rate at batch 256.")
@commands.setting("--epochs", kind=int, metavar="N", values="x>=1", help="How often to go through the training set.")
@click.option(
    "--seed",
    type=SEED,
    metavar="N",
    default=1,
    show_default=True,
    help="Of all four; early epochs differ much between seeds.",
)
@commands.setting(
    "--limit", kind=int, values="x>=1", metavar="N", help="Train on the first N examples, as train.py does."
)
@commands.data_dir
@click.option(
    "--out",
    type=commands.FOLDER,
    default="runs/batch-size",
    show_default=True,
    metavar="DIR",
    help="Leave the picture and a folder a run there.",
)
def batch_size(out: str, **options: Any) -> None:
    """Train with twice the batch on twice the devices. The lecture's experiment: 1 device at batch 256; 2 devices at
    256, at 512, and at 512 with the learning rate scaled. Shows time and test accuracy of each, as a table and a
    picture."""
    from gluon_mgpu.training import batch_size as experiment

    click.echo(experiment.table(experiment.run(out, **options)))
    click.echo(f"{out}/{experiment.PICTURE} shows the accuracy by epoch and by time.")


@click.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu walkthrough
        gluon-mgpu walkthrough --impl highlevel --gpus 2
        gluon-mgpu walkthrough --dataset synthetic --gpus 0,2 --device cpu
    """,
)
@commands.impl
@commands.setting("--dataset", kind=commands.Choice(datasets.NAMES), help="synthetic needs no file.")
@commands.gpus("4", "How many devices, or which; GPUs that are not there are left out.")
@commands.device
@click.option("--seed", type=SEED, metavar="N", default=0, show_default=True, help="Of the parameters.")
@commands.data_dir
def walkthrough(impl: str, gpus: str, **options: Any) -> None:
    """The notebooks' inspection cells, run. What lies on which device during a training step, what is equal where."""
    indices = devices.parse(gpus)
    engine.configure(len(indices))  # before the module imports mxnet
    from gluon_mgpu import walkthrough as tour

    tour.walk(impl, indices, **options)


@click.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu evaluate runs/first
        gluon-mgpu evaluate runs/first --impl highlevel --gpus 2
        gluon-mgpu evaluate runs/first --images coat.png boot.jpg
        gluon-mgpu evaluate runs/first --export lenet
    """,
)
@click.argument("run", type=commands.FOLDER, metavar="RUN")
@click.argument("files", nargs=-1, type=commands.FILE, metavar="")
@click.option(
    "--images",
    multiple=True,
    type=commands.FILE,
    metavar="FILE...",
    help="Print the most probable classes of image files instead. As in the data, the object is to be bright on a dark "
    "ground; colours become grey, and other sizes 28x28.",
)
@click.option(
    "--export",
    type=commands.FILE,
    metavar="PREFIX",
    help="Leave the net as Gluon's PREFIX-symbol.json and PREFIX-0000.params too, for gluon.SymbolBlock.imports. It "
    "takes images (n, 1, 28, 28) in [0, 1].",
)
@click.option(
    "--impl",
    type=commands.IMPLS,
    help="NDArray alone, or Gluon; default the run's own. Both can read lenet.",
)
@commands.gpus()
@commands.device
@commands.data_dir
def evaluate(
    run: str,
    files: tuple[str, ...],
    images: tuple[str, ...],
    export: str | None,
    impl: str | None,
    gpus: str,
    device: str,
    data_dir: str | None,
) -> None:
    """Test accuracy and confusion table of what was trained. RUN is the folder that train.py --out left."""
    if files and not images:
        raise UsageError(f"{files[0]}: give one RUN, and images after --images")
    indices = devices.parse(gpus)
    engine.configure(len(indices))  # before the module imports mxnet
    from gluon_mgpu.training import evaluate as evaluation

    if export is not None:
        evaluation.exported_files(export)  # refuses before anything is computed
    paths = images + files  # the shell's *.png after --images gives it the first one only
    pictures = [evaluation.read_image(path) for path in paths]
    trained = evaluation.load(run, impl, indices, device)
    if pictures:
        click.echo(evaluation.classify(trained, paths, pictures))
    if not pictures or export is not None:
        test_images, test_labels = evaluation.held_out(trained.settings, data_dir)
    if not pictures:
        click.echo(evaluation.report(trained, test_images, test_labels))
    if export is not None:
        click.echo(evaluation.export(trained, export, test_images))


@click.command(
    cls=commands.Command,
    examples="""
        gluon-mgpu parity --quick
        gluon-mgpu parity --seeds 10 --out runs/parity-10
        gluon-mgpu parity --seeds 4,7 --device gpu
    """,
)
@click.option("--quick", is_flag=True, help="In 3 minutes: one training of two recipes, and no batch-size experiment.")
@click.option(
    "--seeds",
    type=Seeds(),
    default="3",
    show_default=True,
    metavar="N|I,J,...",
    help="Of how many seeds each recipe is trained, or of which.",
)
@commands.device
@commands.data_dir
@click.option(
    "--out",
    type=commands.FOLDER,
    default="runs/parity",
    show_default=True,
    metavar="DIR",
    help="Leave parity.json, parity.html and a folder a training there; what is there is not trained again.",
)
@click.pass_context
def parity(context: click.Context, quick: bool, seeds: tuple[int, ...], out: str, **options: Any) -> None:
    """Hold this port against what the notebooks printed. That is accuracies, values, claims. Exit status 0 when all
    holds, 1 when something does not, which the first line names."""
    if quick and context.get_parameter_source("seeds") == ParameterSource.COMMANDLINE:
        raise UsageError("--quick trains with one seed: leave --seeds away")
    engine.configure(4)  # as many contexts as the largest recipe has, before mxnet is imported
    from gluon_mgpu.parity import run as whole

    result = whole.run(out, seeds=seeds, quick=quick, **options)
    click.echo(whole.table(result))
    click.echo(f"\n{whole.files(out, quick)[0]} shows it.")
    context.exit(0 if result["holds"] else 1)


@click.command(
    cls=commands.Command,
    context_settings={"allow_interspersed_args": False},
    examples="""
        gluon-mgpu launch --workers 2 --servers 1 -- gluon-mgpu train --impl highlevel --kvstore dist_sync
        gluon-mgpu launch --workers 4 --servers 2 -- gluon-mgpu train --kvstore dist_sync --compress 2bit:0.5
    """,
)
@click.option("--workers", type=PROCESSES, default=2, show_default=True, metavar="N", help="How many processes train.")
@click.option(
    "--servers", type=PROCESSES, default=1, show_default=True, metavar="N", help="How many hold the parameters."
)
@click.option(
    "--port",
    type=click.IntRange(1, 65534),
    metavar="PORT",
    help="Where the scheduler listens, on PORT and the next one; else on free ones.",
)
@click.argument(
    "command",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="-- COMMAND...",
    shell_complete=lambda context, param, begun: [CompletionItem(begun, type="file")],
)
@click.pass_context
def launch(context: click.Context, command: tuple[str, ...], **options: Any) -> None:
    """Run an MXNet program on several processes of this machine. MXNet's parameter servers: a scheduler, servers, and
    workers, of which the first has the terminal. Where one fails, a line names it and all are ended."""
    context.exit(launcher.launch(command, **options))


@click.group(
    cls=commands.Group,
    epilog='In bash, eval "$(_GLUON_MGPU_COMPLETE=bash_source gluon-mgpu)" lets TAB complete. Others: docs/cli.md',
    examples="""
        gluon-mgpu doctor
        gluon-mgpu train --impl scratch --gpus 2
        gluon-mgpu train --help
    """,
)
@click.version_option(__version__)
def main() -> None:
    """Data-parallel training with MXNet, from scratch and with Gluon."""


for command in (train, walkthrough, batch_size, evaluate, parity, launch, doctor):
    main.add_command(command)
