"""Runs all checks in this process, and each training run in its own process."""

from __future__ import annotations

import hashlib
import itertools
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

import gluon_mgpu
from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets
from gluon_mgpu.support import log, subprocesses
from gluon_mgpu.support.errors import Error
from gluon_mgpu.training import record
from gluon_mgpu.training.record import Run
from parity import Finding, bands, drift, examples
from parity.recipes import RECIPES

ACCURACY = "accuracy"
RECORDED = tuple(name for name, recipe in RECIPES.items() if recipe.test_accuracy)
QUICK = ("scratch-lenet-fashion-mnist-2gpu", "gluon-lenet-mnist-4gpu")


def check_all(
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
    results = train_all(points)
    for recipe, group in itertools.groupby(zip(points, results), lambda pair: pair[0].parent.name):
        kept, new = bands.kept(recipe), []
        for path, result in group:
            title = f"{recipe}, {path.name}"
            if isinstance(result, Error):
                yield Finding(ACCURACY, f"{title} can be trained", False, str(result))
                continue
            new.append([epoch.test_accuracy for epoch in result.position.history])
            judged = bands.judge(new[-1], *bands.bands(kept, kept, bands.DIGITS))
            yield Finding(ACCURACY, f"{title}: accuracies agree with the kept runs", *judged)
        if new:
            printed = RECIPES[recipe].test_accuracy
            judged = bands.judge(printed, *bands.bands(new, kept, bands.decimals(printed)))
            yield Finding(ACCURACY, f"{recipe}: the notebook's accuracies are possible", *judged)


def train_all(points: Mapping[Path, dict[str, Any]]) -> Iterator[Run | Error]:
    """Train runs, each in its own process, because the engine's settings depend on the number of contexts. Finished
    runs are skipped, and interrupted runs continue.

    points: {folder: options of train}. Yields each run, or why it failed.
    """
    with log.progress(total=sum(options["epochs"] for options in points.values()), unit="epoch") as bar:
        for folder, options in points.items():
            bar.set_description(folder.name)
            try:
                result: Run | Error = _train(folder, options, bar.update)
            except Error as error:
                result = error
            yield result


def _train(folder: Path, options: dict[str, Any], on_epochs: Callable[[int], object]) -> Run:
    """on_epochs: called with the number of newly finished epochs."""
    begun = record.exists(folder)
    if begun:
        run = record.read(folder)
        on_epochs(len(run.position.history))
        if len(run.position.history) == options["epochs"]:
            return run
    given = {
        name: value for name, value in {**options, "resume" if begun else "out": folder}.items() if value is not None
    }
    try:
        finished = subprocesses.run(
            [sys.executable, "-m", "gluon_mgpu", "train", *(f"--{n.replace('_', '-')}={v}" for n, v in given.items())],
            on_line=lambda line: on_epochs(line.startswith("epoch ")),
        )
    except KeyboardInterrupt:
        log.say("run the same command again to continue")
        raise
    subprocesses.raise_for_status(str(folder), finished)
    return record.read(folder)


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
