"""The command line: options and one call. Exit status 0; 1 a run failed; 2 the command was wrong; 130 interrupted."""

import importlib
import sys
import traceback

import click
from click.core import ParameterSource

from gluon_mgpu import __version__, datasets, devices, engine, recipes, records
from gluon_mgpu.errors import Error, UsageError
from gluon_mgpu.settings import MODELS, SCHEDULES, SGD, Settings


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


def _setting(*names, kind, help=None, metavar=None, flag=False):
    """An option for a field of Settings, with its default; Settings checks the value."""
    default = getattr(SGD, names[0][2:].replace("-", "_"))
    shown = default not in (None, False, ())
    options = {"is_flag": True} if flag else {"type": kind, "metavar": metavar}
    return click.option(*names, default=default, show_default=shown, help=help, **options)


def _gpus(default="1", help="How many devices, or which."):
    return click.option("--gpus", default=default, show_default=True, metavar="N|I,J,...", help=help)


IMPLS = click.Choice(records.IMPLS)
_impl = click.option("--impl", type=IMPLS, default="scratch", show_default=True, help="NDArray alone, or Gluon.")
_device = click.option(
    "--device",
    type=click.Choice(devices.DEVICES),
    default="auto",
    show_default=True,
    help="auto: GPUs where there are any, else as many CPU contexts.",
)
_data_dir = click.option(
    "--data-dir",
    type=click.Path(),
    metavar="DIR",
    help="Where the data is; else GLUON_MGPU_DATA, the usual folders, a download.",
)


class Numbers(click.ParamType):
    """Numbers with commas between them, or one of the words."""

    def __init__(self, kind, *words):
        self.kind, self.words, self.name = kind, words, "numbers"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple) or value in self.words:
            return value
        try:
            return tuple(self.kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value}: give numbers with commas between them{''.join(f', or {w}' for w in self.words)}")


def _list_recipes(ctx, _, asked):
    if asked and not ctx.resilient_parsing:
        click.echo(recipes.table())
        ctx.exit()


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  train.py --impl scratch --gpus 2
  train.py --impl highlevel --gpus 0,2 --device gpu
  train.py --recipe gluon-lenet-mnist-4gpu
  train.py --impl highlevel --model resnet18 --gpus 2 --lr 0.1 --momentum 0.9 --schedule cosine
  train.py --impl highlevel --gpus 4 --seed 1 --out runs/first
  train.py --resume runs/first --epochs 10""",
)
@click.option("--recipe", type=click.Choice(recipes.RECIPES), metavar="NAME", help="One of the notebooks' experiments.")
@click.option(
    "--list-recipes",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_recipes,
    help="Print these and their sources.",
)
@_impl
@_setting("--model", kind=click.Choice(MODELS), help="lenet-max has max pooling; it and resnet18 are highlevel's only.")
@_setting("--dataset", kind=click.Choice(datasets.NAMES))
@_gpus()
@_device
@_setting("--batch-size", kind=int, help="Examples a step, over all devices together.")
@_setting(
    "--shares", kind=Numbers(float, "auto"), metavar="A,B,...|auto", help="Parts of a batch for unequal devices: 80,20."
)
@_setting("--lr", kind=float, help="Learning rate.")
@_setting("--scale-lr", kind=bool, flag=True, help="--lr is for a batch of 256: scale it to this one.")
@_setting("--schedule", kind=click.Choice(SCHEDULES), help="How the learning rate goes on.")
@_setting("--step-epochs", kind=Numbers(int), metavar="E,F,...", help="After which epochs --schedule step steps.")
@_setting("--step-factor", kind=float, help="What --schedule step multiplies the learning rate by.")
@_setting("--warmup-epochs", kind=float, help="The learning rate first grows from 0 for so long.")
@_setting("--momentum", kind=float, help="Part of the last update that the next one repeats, such as 0.9.")
@_setting("--weight-decay", kind=float, help="Part of every parameter that is taken off a step, times --lr.")
@_setting("--clip-norm", kind=float, metavar="NORM", help="Scale a gradient of a larger norm down to this one.")
@_setting("--accumulate", kind=int, metavar="K", help="Compute a batch's gradient in K pieces: needs less memory.")
@_setting("--epochs", kind=int)
@_setting("--seed", kind=int, metavar="N", help="Makes a run on CPU repeatable bit for bit.")
@_setting(
    "--limit",
    kind=int,
    metavar="N",
    help="Train on the first N examples, evaluate on the first N/6 of the test set (at least 100).",
)
@_data_dir
@click.option(
    "--out",
    type=click.Path(),
    metavar="DIR",
    help="Leave config.json, metrics.jsonl, curves.png and checkpoint.npz there.",
)
@click.option(
    "--resume",
    type=click.Path(),
    metavar="DIR",
    help="Go on with a run from its checkpoint, with its own settings; other --gpus, --shares or --impl may be given, "
    "and more --epochs, but to a cosine schedule.",
)
@click.option("--tensorboard", is_flag=True, help="Write for TensorBoard too, into the run's folder.")
@click.option(
    "--hybridize/--no-hybridize",
    default=True,
    help="highlevel: run the net as one graph (default), or operator by operator.",
)
@click.version_option(__version__)
@click.pass_context
def train(context, recipe, **options):
    """Train LeNet or ResNet-18 with data parallelism; prints time and test accuracy after each epoch."""
    given = {name for name in options if context.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    if recipe and options["resume"] is not None:
        raise UsageError("--recipe and --resume: a resumed run has its own settings")
    if recipe:
        options.update({k: v for k, v in recipes.RECIPES[recipe].options.items() if k not in given})
    if options["resume"]:
        of_run = records.options(options["resume"])
        options.update({k: v for k, v in of_run.items() if k not in given})
        if "shares" not in given and len(devices.parse(options["gpus"])) != len(of_run["gpus"]):
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
    cls=Command,
    epilog="""\b
Examples:
  bench.py
  bench.py --rounds 5 --steps 200
  bench.py --what engine""",
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
def bench(what, rounds, steps):
    """Time and memory a step, ours and the notebook's code, each in its own processes, taken in turn."""
    from gluon_mgpu import bench as benchmark

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


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  batch_size.py
  batch_size.py --impl highlevel --epochs 10 --out runs/batch-size-10
  batch_size.py --dataset synthetic --limit 12000""",
)
@_impl
@_setting("--dataset", kind=click.Choice(datasets.NAMES))
@_device
@_setting("--lr", kind=float, help="Learning rate at batch 256.")
@_setting("--epochs", kind=int)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Of all four; early epochs differ much between seeds."
)
@_setting("--limit", kind=int, metavar="N", help="Train on the first N examples, as train.py does.")
@_data_dir
@click.option(
    "--out",
    type=click.Path(),
    default="runs/batch-size",
    show_default=True,
    metavar="DIR",
    help="Leave the picture and a folder a run there.",
)
def batch_size(out, **options):
    """The lecture's experiment: 1 device at batch 256; 2 devices at 256, at 512, and at 512 with the learning rate
    scaled. Shows time and test accuracy of each, as a table and a picture."""
    from gluon_mgpu import batch_size as experiment

    click.echo(experiment.table(experiment.run(out, **options)))
    click.echo(f"{out}/{experiment.PICTURE} shows the accuracy by epoch and by time.")


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  walkthrough.py
  walkthrough.py --impl highlevel --gpus 2
  walkthrough.py --dataset synthetic --gpus 0,2 --device cpu""",
)
@_impl
@_setting("--dataset", kind=click.Choice(datasets.NAMES))
@_gpus("4", "How many devices, or which; GPUs that are not there are left out.")
@_device
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Of the parameters.")
@_data_dir
def walkthrough(impl, gpus, **options):
    """The notebooks' inspection cells: what lies on which device during a training step, and what is equal where."""
    indices = devices.parse(gpus)
    engine.configure(len(indices))  # before the module imports mxnet
    from gluon_mgpu import walkthrough as tour

    tour.walk(impl, indices, **options)


@click.command(
    cls=Command,
    epilog="""\b
Examples:
  evaluate.py runs/first
  evaluate.py runs/first --impl highlevel --gpus 2
  evaluate.py runs/first --images coat.png boot.jpg
  evaluate.py runs/first --export lenet""",
)
@click.argument("run", type=click.Path(), metavar="RUN")
@click.argument("files", nargs=-1, type=click.Path(), metavar="")
@click.option(
    "--images",
    multiple=True,
    type=click.Path(),
    metavar="FILE...",
    help="Print the most probable classes of image files instead. As in the data, the object is to be bright on a dark "
    "ground; colours become grey, and other sizes 28x28.",
)
@click.option(
    "--export",
    type=click.Path(),
    metavar="PREFIX",
    help="Leave the net as Gluon's PREFIX-symbol.json and PREFIX-0000.params too, for gluon.SymbolBlock.imports. It "
    "takes images (n, 1, 28, 28) in [0, 1].",
)
@click.option(
    "--impl",
    type=IMPLS,
    help="NDArray alone, or Gluon; default the run's own. Both can read lenet.",
)
@_gpus()
@_device
@_data_dir
def evaluate(run, files, images, export, impl, gpus, device, data_dir):
    """Test accuracy and confusion table of RUN, a folder that train.py --out left."""
    if files and not images:
        raise UsageError(f"{files[0]}: give one RUN, and images after --images")
    indices = devices.parse(gpus)
    engine.configure(len(indices))  # before the module imports mxnet
    from gluon_mgpu import evaluate as evaluation

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


@click.group(cls=Group)
@click.version_option(__version__)
def main():
    """Data-parallel training with MXNet, from scratch and with Gluon."""


for command in (train, walkthrough, batch_size, evaluate, bench):
    main.add_command(command)
