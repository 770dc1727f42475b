"""`gluon-mgpu evaluate`: show a run's accuracy, classify images, or export the network."""

from __future__ import annotations

from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.runtime.errors import UsageError, setting


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu evaluate runs/first
        gluon-mgpu evaluate runs/first --impl highlevel --gpus 2
        gluon-mgpu evaluate runs/first --images coat.png boot.jpg
        gluon-mgpu evaluate runs/first --export lenet
    """,
)
@click.argument("run", type=common.FOLDER, metavar="RUN")
@click.argument("files", nargs=-1, type=common.FILE, metavar="")
@common.option(
    "--images",
    multiple=True,
    type=common.FILE,
    metavar="FILE...",
    help="Print the top classes of these images instead of the accuracy. As in the data set, each object should "
    "be bright on a dark background. Images get the size and the channels that the network was trained with.",
)
@common.option(
    "--export",
    type=common.FILE,
    metavar="PREFIX",
    help="Also export the network for gluon.SymbolBlock.imports, as `convert RUN --to gluon PREFIX` does. The input "
    "of the network is a batch of images (n, 1, 28, 28) in [0, 1].",
)
@common.settings(
    *("impl", "num_gpus", "device", "data_dir"),
    impl={
        "default": None,
        "help": "Implementation to evaluate with; scratch and highlevel can load each other's lenet runs. Default: the "
        "run's implementation.",
    },
)
def evaluate(run: str, files: tuple[str, ...], images: tuple[str, ...], export: str | None, **options: Any) -> None:
    """Show the test accuracy and the confusion matrix of a run. RUN is the folder that train --out wrote."""
    if files and not images:
        raise UsageError(None, files[0], f"only one RUN can be evaluated; image files go after {setting('images')}")
    indices, impl, data_dir = devices.parse(options["num_gpus"]), options["impl"], options["data_dir"]
    engine.configure(len(indices))  # before the following modules import mxnet
    from gluon_mgpu import convert
    from gluon_mgpu import evaluate as evaluation

    if export is not None:
        convert.check_prefix("gluon", export)  # before anything is computed
    paths = images + files  # in `--images *.png`, only the first file is the option's value
    trained = evaluation.load(run, impl, indices, options["device"])
    pictures = [evaluation.read_image(path, trained.replicas.image_shape) for path in paths]
    if pictures:
        click.echo(evaluation.classify(trained, paths, pictures))
    else:
        click.echo(evaluation.report(trained, *evaluation.held_out(trained.settings, data_dir)))
    if export is not None:
        click.echo(convert.save(convert.from_run(run, impl, data_dir), "gluon", export))
