"""`gluon-mgpu evaluate`: show a run's accuracy, or classify images."""

from __future__ import annotations

from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.compat import startup
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.support.params import FILE, FOLDER


@common.command(
    examples="""
        gluon-mgpu evaluate runs/first
        gluon-mgpu evaluate runs/first --impl highlevel --gpus 2
        gluon-mgpu evaluate runs/first coat.png boot.jpg
    """,
)
@click.argument("run", type=FOLDER, metavar="RUN")
@click.argument("images", nargs=-1, type=FILE, metavar="[IMAGE]...")
@common.settings(
    *("impl", "gpus", "device", "data_dir"),
    impl={
        "default": None,
        "help": "Implementation to evaluate with; scratch and highlevel can load each other's lenet runs. Default: the "
        "run's implementation.",
    },
)
def evaluate(run: str, images: tuple[str, ...], **options: Any) -> None:
    """Show the test accuracy and the confusion matrix of a run, or the top classes of image files. RUN is the folder
    that train --out wrote. As in the data set, each IMAGE should show a bright object on a dark background; it is
    converted to the size and the channels that the network was trained with."""
    if images and options["data_dir"]:
        raise UsageError("data_dir", options["data_dir"], "not needed to classify images; omit it")
    startup.configure(len(options["gpus"]))  # before the following modules import mxnet
    from gluon_mgpu import evaluate as evaluation

    trained = evaluation.load(run, options["impl"], options["gpus"], options["device"])
    pictures = [evaluation.read_image(path, trained.model.image_shape) for path in images]
    if pictures:
        click.echo(evaluation.classify(trained, images, pictures))
    else:
        click.echo(evaluation.report(trained, *evaluation.held_out(trained.run, options["data_dir"])))
