"""`gluon-mgpu convert`: convert a network to files for Gluon, PyTorch or ONNX Runtime."""

from __future__ import annotations

from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.compat import startup
from gluon_mgpu.support.errors import UsageError
from gluon_mgpu.support.params import FILE, FloatRange


def parse_shape(value: str) -> tuple[str, tuple[int | str, ...]]:
    """Parse the name, "" if there is none, and the shape of an input, such as 1,28,28, data=35,n,200 or length=."""
    name, _, shape = value.rpartition("=")
    words = [word for word in shape.split(",") if shape]
    if not (name or words) or not all(word == "n" or word.isdecimal() and int(word) for word in words):
        raise click.BadParameter(f"{value!r} is not a shape such as 1,28,28 or data=1,28,28")
    if words.count("n") > 1:
        raise click.BadParameter(f"{value!r} has more than one n")
    return name, tuple(word if word == "n" else int(word) for word in words)


@common.command(
    examples="""
        gluon-mgpu convert runs/first --to pytorch lenet
        gluon-mgpu convert runs/first --to onnx lenet
        gluon-mgpu convert net-symbol.json net-0000.params --input 3,224,224 --to pytorch net
    """,
)
@click.argument("sources", nargs=-1, type=FILE, metavar="RUN | NET-symbol.json NET-0000.params")
@click.argument("prefix", type=FILE)
@common.option(
    "--to",
    type=click.Choice(["gluon", "pytorch", "onnx"]),
    help="gluon writes PREFIX-symbol.json and PREFIX-0000.params, pytorch writes PREFIX.py and PREFIX.safetensors, and "
    "onnx writes PREFIX.onnx.",
)
@common.option(
    "--input",
    multiple=True,
    type=parse_shape,
    metavar="[NAME=]C,H,W",
    help="Shape of one input of NET, without the batch, such as 1,28,28 or data=1,28,28. Repeat the option for each "
    "input. NAME= means one number per example. If the batch is not the first axis, write n for it: data=35,n,200.",
)
@common.option(
    "--output",
    multiple=True,
    metavar="NAME",
    help="Convert NET only up to this output or layer. Can be repeated. Default: the outputs of NET.",
)
@common.option(
    "--tolerance",
    type=FloatRange(0, min_open=True),
    default=1e-4,
    show_default=True,
    help="Largest difference between the converted network's scores and MXNet's, relative to the scores.",
)
@common.settings(
    *("impl", "data_dir"),
    impl={
        "default": None,
        "help": "Implementation that computes the scores of RUN to compare with. Default: the run's implementation.",
    },
)
def convert(
    sources: tuple[str, ...],
    prefix: str,
    to: str | None,
    input: tuple[Any, ...],
    output: tuple[str, ...],
    tolerance: float,
    **options: Any,
) -> None:
    """Convert the network of a run, or a network that HybridBlock.export or Module.save_checkpoint wrote.

    RUN is the folder that train --out wrote. Before the files are moved into place, they are loaded and checked: their
    scores for the run's test images, or for random inputs, must match MXNet's scores.
    """
    given = (*sources, prefix)
    parameters = [name for name in given if name.endswith(".params")]
    if parameters and len(sources) < 2:
        advice = "has no network; build it with its code, then load_parameters, hybridize, call it once, and export"
        raise UsageError(None, parameters[0], f"{advice} (docs/convert.md)")
    if to is None:
        raise UsageError("to", None, "must be one of gluon, pytorch, onnx")
    if len(sources) not in (1, 2):
        raise UsageError(None, None, "convert needs RUN PREFIX, or NET-symbol.json NET-0000.params PREFIX")
    if (len(sources) == 2) != bool(input):
        raise UsageError("input", None, "required with NET-symbol.json and NET-0000.params; omit it with RUN")
    if output and len(sources) == 1:
        raise UsageError("output", output[0], "only for a NET; omit it")
    names = {name for name, _ in input}
    if "" in names and len(names) > 1 or "" not in names and len(names) < len(input):
        raise UsageError("input", None, "give each input's name once, or no names")
    for name, value in options.items():
        if len(sources) == 2 and value is not None:
            raise UsageError(name, value, "only for a RUN; omit it")
    startup.configure(1)  # before `convert` imports mxnet
    from gluon_mgpu import convert as conversion

    conversion.check_prefix(to, prefix)
    if len(sources) == 1:
        network = conversion.from_run(sources[0], **options)
    else:
        shapes = [shape for _, shape in input] if "" in names else []
        named = None if "" in names else dict(input)
        network = conversion.from_files(sources[0], sources[1], *shapes, inputs=named, outputs=output)
    click.echo(conversion.save(network, to, prefix, tolerance))
