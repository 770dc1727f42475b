"""Runs all checks in this process and each training run in its own process, then writes parity.json and parity.png."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from batch_size import experiment
from mxnet import Context

import gluon_mgpu
from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets
from gluon_mgpu.support import files, log
from gluon_mgpu.support.errors import Error
from gluon_mgpu.training.recipes import RECIPES
from parity import Finding, bands, claims, drift, examples, report

ACCURACY = "accuracy"
DEVICES = 4  # number of devices in the largest recipe
RECORDED = tuple(name for name, recipe in RECIPES.items() if recipe.test_accuracy)
QUICK = ("scratch-lenet-fashion-mnist-2gpu", "gluon-lenet-mnist-4gpu")
QUICK_SEEDS = (1,)


def run(
    out: str | Path,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    quick: bool = False,
    device: str = "auto",
    data_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Run all checks, write parity.json and parity.png to `out`, and return the content of parity.json.

    seeds: used for each recipe and for the batch-size experiment. quick: train only the QUICK recipes with one seed,
    skip the experiment, and write parity-quick.json and parity-quick.png. device, data_dir: as for `train`; "auto" uses
    GPUs only if there are at least DEVICES. Training runs that were already finished with the same code and
    libraries are skipped. A training run that fails becomes a finding.
    Raises UsageError if a device does not exist or another process is writing to `out`, Error if the data is missing.
    """
    os.makedirs(out, exist_ok=True)
    lock = files.lock(out, "out")
    try:
        result = _results(Path(out), tuple(seeds), quick, _contexts(device), data_dir)
        numbers, picture = result_files(out, quick)
        files.write_whole(picture, lambda file: report.draw(result, file))
        files.write_whole(numbers, lambda file: file.write(json.dumps(result, indent=1).encode()))
        return result
    finally:
        os.close(lock)


def _results(
    out: Path, seeds: tuple[int, ...], quick: bool, ctx: list[Context], data_dir: str | Path | None
) -> dict[str, Any]:
    kind = ctx[0].device_type
    mnist, fashion_mnist = (datasets.load(name, data_dir) for name in ("mnist", "fashion-mnist"))
    seeds, recipes = (QUICK_SEEDS, QUICK) if quick else (seeds, RECORDED)
    folder = out / f"{kind}-{_version()}"
    mx.random.seed(seeds[0])
    printed = list(examples.check(ctx, mnist))
    drifted = drift.measure(ctx[:2], fashion_mnist, drift.reference(ctx[:2], fashion_mnist, drift.STEPS))
    claimed = [*claims.placed(ctx[:2]), *claims.shared_unevenly(ctx[:2], mnist)]
    accuracy, trained = _train_all(recipes, seeds, folder, kind, data_dir)
    findings = [*trained, *printed, *drift.check(drifted), *claimed]
    if quick:
        findings += [Finding(claims.CHECK, claim, None, "skipped by --quick") for claim in claims.OF_BATCH_SIZE]
    else:
        experiments = [
            experiment.run(folder / "batch-size" / f"seed-{seed}", kind, data_dir=data_dir, seed=seed) for seed in seeds
        ]
        findings += claims.batch_size(experiments, kind == "cpu")
    return {
        "verdict": verdict(findings),
        "holds": all(finding.holds is not False for finding in findings),
        "made_by": {
            "gluon_mgpu": gluon_mgpu.__version__,
            "python": platform.python_version(),
            "mxnet": mx.__version__,
            "numpy": np.__version__,
            "devices": {"cpu": "CPU contexts", "gpu": "GPUs"}[kind],
            "seeds": list(seeds),
            "quick": quick,
            "trainings": folder.name,
            "date": datetime.date.today().isoformat(),
        },
        "findings": [finding._asdict() for finding in findings],
        "accuracy": accuracy,
        "drift": drifted._asdict(),
    }


def result_files(out: str | Path, quick: bool) -> tuple[Path, Path]:
    """The paths of the JSON file and the picture that `run` writes."""
    name = "parity-quick" if quick else "parity"
    return Path(out) / f"{name}.json", Path(out) / f"{name}.png"


def verdict(findings: list[Finding]) -> str:
    """One line that says either that no claim fails, or how many claims fail and which is the first."""
    failed = [f"{f.check}: {f.claim} ({f.evidence})" for f in findings if f.holds is False]
    if failed:
        return f"parity FAILS: {len(failed)} of {len(findings)} claims; {failed[0]}"
    unshown = sum(finding.holds is None for finding in findings)
    return f"parity holds: {len(findings) - unshown} of {len(findings)} claims; {unshown} cannot be decided here"


def _contexts(device: str) -> list[Context]:
    """Choose DEVICES contexts: either only GPUs or only CPU contexts."""
    if device == "auto" and 0 < mx.context.num_gpus() < DEVICES:
        log.say(f"parity needs {DEVICES} GPUs, but this machine has fewer: using CPU contexts")
        device = "cpu"
    return devices.contexts(DEVICES, device)


def _train_all(
    recipes: Sequence[str], seeds: Sequence[int], folder: Path, kind: str, data_dir: str | Path | None
) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """Train each recipe with each seed. Returns ({recipe: accuracies and bands}, findings about the runs)."""
    accuracy, findings = {}, []
    epochs = sum(RECIPES[recipe].options["epochs"] for recipe in recipes) * len(seeds)
    with log.progress(total=epochs, unit="epoch") as bar:
        for recipe in recipes:
            runs: dict[str, list[float]] = {}
            for seed in seeds:
                name = f"{recipe}, seed {seed}"
                bar.set_description(name)
                options = {**RECIPES[recipe].options, "seed": seed, "device": kind, "data_dir": data_dir}
                try:
                    run = experiment.finish(name, folder / recipe / f"seed-{seed}", options, bar.update)
                except Error as error:
                    findings.append(Finding(ACCURACY, f"{name} can be trained", False, str(error)))
                    continue
                runs[str(seed)] = accuracies = [epoch.test_accuracy for epoch in run.position.history]
                bar.clear()
                log.say(f"{name}: test accuracy {' '.join(f'{value:.4f}' for value in accuracies)}")
                within = _within(bands.among_kept(recipe, accuracies))
                findings.append(Finding(ACCURACY, f"{name}: accuracies agree with the kept runs", *within))
            if runs:
                held = bands.of_recipe(recipe, list(runs.values()))
                findings.append(
                    Finding(ACCURACY, f"{recipe}: the notebook's accuracies are within the bands", *_within(held))
                )
                low, high, printed = zip(*held)
                about = {"source": RECIPES[recipe].source, "notebook": printed}
                accuracy[recipe] = {**about, "runs": runs, "low": low, "high": high}
    return accuracy, findings


def _within(held: list[bands.Band]) -> tuple[bool, str]:
    """Returns whether the accuracies of all epochs are within their bands, and the evidence."""
    outside = [
        f"epoch {epoch}: {band.recorded:.4g} is not between {band.low:.4f} and {band.high:.4f}"
        for epoch, band in enumerate(held, 1)
        if not band.holds
    ]
    return not outside, "; ".join(outside) or f"all {len(held)} epochs are within their bands"


def _version() -> str:
    """8 hexadecimal digits that identify this project's code, except commands, and the versions of the libraries."""
    digest = hashlib.sha256(f"{mx.__version__} {np.__version__} {platform.python_version()}".encode())
    package = Path(gluon_mgpu.__file__).parent
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] != "commands":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
