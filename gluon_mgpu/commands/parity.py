"""`gluon-mgpu parity`: compare this project with what the notebooks printed."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from gluon_mgpu.commands import common
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.runtime.errors import UsageError


class Seeds(click.ParamType):
    """Parses a number of seeds (3 means seeds 1, 2 and 3) or a list of seeds (4,7) to a tuple."""

    name = "seeds"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            seeds = devices.count_or_list(value, first=1)
        except ValueError:
            seeds = []
        if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**31 for seed in seeds):
            self.fail(f"{value!r} is not a number of seeds (3) or a list of distinct seeds (4,7)", param, context)
        return tuple(seeds)


@click.command(
    cls=common.Command,
    examples="""
        gluon-mgpu parity --quick
        gluon-mgpu parity --seeds 10 --out runs/parity-10
        gluon-mgpu parity --seeds 4,7 --device gpu
    """,
)
@click.option(
    "--quick", is_flag=True, help="Finish in about 3 minutes: train two recipes once, skip the batch-size experiment."
)
@common.option(
    "--seeds",
    type=Seeds(),
    default="3",
    show_default=True,
    metavar="N|I,J,...",
    help="Number of seeds to train each recipe with (3), or a list of seeds (4,7).",
)
@common.device
@common.data_dir
@common.option(
    "--out",
    type=common.FOLDER,
    default="runs/parity",
    show_default=True,
    metavar="DIR",
    help="Write parity.json, parity.html and one folder per training run to this folder; finished runs are skipped.",
)
@click.pass_context
def parity(context: click.Context, quick: bool, seeds: tuple[int, ...], out: str, **options: Any) -> None:
    """Compare this project with what the notebooks printed. Compares accuracies, values and claims. The exit status
    is 0 if everything agrees; otherwise it is 1, and the first line names a difference."""
    if quick and context.get_parameter_source("seeds") == ParameterSource.COMMANDLINE:
        raise UsageError("--quick uses one seed: omit --seeds")
    engine.configure(4)  # the largest recipe has 4 contexts; call this before mxnet is imported
    from gluon_mgpu.parity import report
    from gluon_mgpu.parity import run as comparison

    result = comparison.run(out, seeds=seeds, quick=quick, **options)
    click.echo(report.text(result))
    click.echo(f"\nsee {comparison.files(out, quick)[0]}")
    context.exit(0 if result["holds"] else 1)
