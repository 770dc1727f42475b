"""`python scripts/parity.py`: compare this project's results with the notebooks' results."""

from __future__ import annotations

import click

from gluon_mgpu.commands import common
from gluon_mgpu.compat import startup


@click.command(
    cls=common.Command,
    examples="""
        python scripts/parity.py --quick
        python scripts/parity.py --seeds 10 --out runs/parity-10
    """,
)
@common.option("--quick", is_flag=True, help="Train only two recipes. With one seed, this takes about 3 minutes.")
@common.option("--seeds", type=click.IntRange(1, 1000), help="Number of runs per recipe.  [default: 3; 1 with --quick]")
@common.settings(
    *("device", "data_dir", "out"),
    out={"default": "runs/parity", "help": "Write one folder per run to this folder; finished runs are skipped."},
)
@click.pass_context
def parity(context: click.Context, quick: bool, seeds: int | None, device: str, data_dir: str | None, out: str) -> None:
    """Compare this project's accuracies and printed values with the notebooks'. If a claim fails, the exit status is 1,
    and the first line of the output names it. Otherwise, the exit status is 0."""
    startup.configure(4)  # before mxnet is imported; the largest recipe uses 4 contexts
    from parity import checks

    recipes = checks.QUICK if quick else checks.RECORDED
    findings = checks.check_all(out, recipes, seeds or (1 if quick else 3), device, data_dir)
    click.echo(checks.text(findings))
    context.exit(0 if all(finding.holds for finding in findings) else 1)
