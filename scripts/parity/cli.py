"""`python scripts/parity.py`: compare this project's results with the notebooks' results."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from gluon_mgpu.commands import common
from gluon_mgpu.compat import devices, startup
from gluon_mgpu.support.errors import UsageError


def parse_seeds(text: str) -> list[int]:
    return devices.parse(text, "seeds", first=1, below=2**31)


@click.command(
    cls=common.Command,
    examples="""
        python scripts/parity.py --quick
        python scripts/parity.py --seeds 10 --out runs/parity-10
        python scripts/parity.py --seeds 4,7 --device gpu
    """,
)
@common.option(
    "--quick",
    is_flag=True,
    help="Train only two recipes, once each, and skip the batch-size experiment. This takes about 3 minutes.",
)
@common.option(
    "--seeds",
    type=parse_seeds,
    default="3",
    metavar="N|I,J,...",
    help="Number of seeds for each recipe, such as 3, or the seeds themselves, such as 4,7.",
)
@common.settings(
    *("device", "data_dir", "out"),
    out={
        "default": "runs/parity",
        "help": "Write parity.json, parity.png and one folder per training run to this folder; finished runs are "
        "skipped.",
    },
)
@click.pass_context
def parity(context: click.Context, quick: bool, seeds: list[int], out: str, **options: Any) -> None:
    """Compare this project's accuracies and printed values with the notebooks', and check the lecture's claims. If a
    claim fails, the exit status is 1, and the first line of the output names it. Otherwise, the exit status is 0."""
    if quick and context.get_parameter_source("seeds") == ParameterSource.COMMANDLINE:
        raise UsageError("quick", True, "uses one seed; omit --seeds")
    startup.configure(4)  # before mxnet is imported; the largest recipe uses 4 contexts
    from parity import report
    from parity import run as comparison

    result = comparison.run(out, seeds=seeds, quick=quick, **options)
    click.echo(report.text(result))
    numbers, picture = comparison.result_files(out, quick)
    click.echo(f"\nsee {picture} for the plots and {numbers} for all numbers")
    context.exit(0 if result["holds"] else 1)
