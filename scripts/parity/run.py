"""Runs all checks in this process, and each training run in its own process."""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import mxnet as mx
import numpy as np
from batch_size import experiment

import gluon_mgpu
from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets
from gluon_mgpu.support.errors import Error
from gluon_mgpu.training.recipes import RECIPES
from parity import Finding, bands, drift, examples

ACCURACY = "accuracy"
RECORDED = tuple(name for name, recipe in RECIPES.items() if recipe.test_accuracy)
QUICK = ("scratch-lenet-fashion-mnist-2gpu", "gluon-lenet-mnist-4gpu")


def run(
    out: str | Path, recipes: Sequence[str], seeds: int, device: str = "auto", data_dir: str | Path | None = None
) -> list[Finding]:
    """Run all checks.

    recipes: trained with seeds 1 to `seeds`, each run in a folder in `out`; runs that were already finished with the
    same code and libraries are skipped. device, data_dir: as for `train`.
    Raises UsageError if a device does not exist, Error if the data is missing.
    """
    ctx = devices.contexts(4, device)  # the largest recipe has 4
    mnist, fashion_mnist = (datasets.load(name, data_dir) for name in ("mnist", "fashion-mnist"))
    mx.random.seed(1)
    findings = [*examples.check(ctx, mnist), *drift.check(ctx[:2], fashion_mnist, drift.STEPS)]
    folder = Path(out, f"{ctx[0].device_type}-{_version()}")
    return [*train(recipes, seeds, folder, ctx[0].device_type, data_dir), *findings]


def train(
    recipes: Sequence[str], seeds: int, folder: Path, device: str, data_dir: str | Path | None
) -> Iterator[Finding]:
    """Train each recipe with each seed, and check the accuracies. A run that fails becomes a finding."""
    points = {
        folder / recipe / f"seed-{seed}": RECIPES[recipe].options
        | {"seed": seed, "device": device, "data_dir": data_dir}
        for recipe in recipes
        for seed in range(1, seeds + 1)
    }
    results = experiment.train_all(points, {})
    for recipe, group in itertools.groupby(zip(points, results), lambda pair: pair[0].parent.name):
        kept, runs = bands.kept(recipe), []
        for path, result in group:
            title = f"{recipe}, {path.name}"
            if isinstance(result, Error):
                yield Finding(ACCURACY, f"{title} can be trained", False, str(result))
                continue
            runs.append([epoch.test_accuracy for epoch in result.position.history])
            judged = bands.judge(runs[-1], *bands.bands(kept, kept, bands.DIGITS))
            yield Finding(ACCURACY, f"{title}: accuracies agree with the kept runs", *judged)
        if runs:
            printed = RECIPES[recipe].test_accuracy
            judged = bands.judge(printed, *bands.bands(runs, kept, bands.decimals(printed)))
            yield Finding(ACCURACY, f"{recipe}: the notebook's accuracies are possible", *judged)


def text(findings: Sequence[Finding]) -> str:
    """Format findings for a terminal. The first line says whether all claims hold, or which is the first to fail."""
    failed = [f"{f.check}: {f.claim} ({f.evidence})" for f in findings if not f.holds]
    lines = [f"parity holds: {len(findings)} claims"]
    if failed:
        lines = [f"parity FAILS: {len(failed)} of {len(findings)} claims; {failed[0]}"]
    for check, group in itertools.groupby(findings, lambda finding: finding.check):
        lines += ["", check, *(f"  {'holds' if f.holds else 'FAILS'}  {f.claim}: {f.evidence}" for f in group)]
    return "\n".join([*lines, "", _versions()])


def _versions() -> str:
    return f"MXNet {mx.__version__}, NumPy {np.__version__}, Python {platform.python_version()}"


def _version() -> str:
    """8 hexadecimal digits that identify this project's code and the versions of the libraries."""
    digest = hashlib.sha256(_versions().encode())
    for path in sorted(Path(gluon_mgpu.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
