"""`gluon-mgpu convert`: convert a network to files for Gluon, PyTorch or ONNX Runtime."""

from __future__ import annotations

import click

from gluon_mgpu.commands import common
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import UsageError


class Shape(click.ParamType):
    """The shape of one image, such as 1,28,28."""

    name = "sizes"

    def convert(self, value: str, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        words = value.split(",")
        if not all(word.isdecimal() and int(word) for word in words):
            self.fail(f"{value!r} is not a shape such as 1,28,28", param, context)
        return tuple(map(int, words))


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu convert runs/first --to pytorch lenet
        gluon-mgpu convert runs/first --to onnx lenet
        gluon-mgpu convert net-symbol.json net-0000.params --input 3,224,224 --to pytorch net
    """,
)
@click.argument("sources", nargs=-1, type=common.FILE, metavar="RUN | NET-symbol.json NET-0000.params")
@click.argument("prefix", type=common.FILE)
@common.option(
    "--to",
    required=True,
    type=click.Choice(["gluon", "pytorch", "onnx"]),
    help="gluon writes PREFIX-symbol.json and PREFIX-0000.params, pytorch writes PREFIX.py and PREFIX.safetensors, and "
    "onnx writes PREFIX.onnx.",
)
@common.option(
    "--input",
    type=Shape(),
    metavar="C,H,W",
    help="Shape of one input image of NET, without the batch dimension, such as 1,28,28.",
)
@common.settings("data_dir")
def convert(
    sources: tuple[str, ...], prefix: str, to: str, input: tuple[int, ...] | None, data_dir: str | None
) -> None:
    """Convert the network of a run, or any network that Gluon exported.

    RUN is the folder that train --out wrote. Before the files are moved into place, they are loaded and checked: their
    scores for the run's test images, or for random images, must match MXNet's scores within a relative error of 1e-5.
    """
    if len(sources) not in (1, 2):
        raise UsageError("convert needs RUN PREFIX, or NET-symbol.json NET-0000.params PREFIX")
    if (len(sources) == 2) != (input is not None):
        raise UsageError("--input is required with NET-symbol.json and NET-0000.params; omit it with RUN")
    engine.configure(1)  # before `convert` imports mxnet
    from gluon_mgpu import convert as conversion

    conversion.check_prefix(to, prefix)
    if input is None:
        network = conversion.from_run(sources[0], data_dir=data_dir)
    else:
        network = conversion.from_files(sources[0], sources[1], input)
    click.echo(conversion.save(network, to, prefix))
