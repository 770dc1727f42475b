"""The whole of parity: checks in this process, each training in one of its own, a table, parity.json and a page."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from gluon_mgpu import __version__
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.runtime import subprocesses as own_process
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import batch_size, checkpoint, datasets, records
from gluon_mgpu.training.recipes import RECIPES

engine.configure()

import mxnet as mx  # noqa: E402
from mxnet import Context  # noqa: E402

from gluon_mgpu.parity import bands, claims, drift, examples, page  # noqa: E402
from gluon_mgpu.parity.finding import Finding  # noqa: E402

ACCURACY = "accuracy"
DEVICES = 4  # that the largest recipe wants
RECORDED = tuple(name for name, recipe in RECIPES.items() if recipe.test_accuracy)
QUICK = ("scratch-lenet-fashion-mnist-2gpu", "gluon-lenet-mnist-4gpu")
QUICK_SEEDS = (1,)
CHECKS = (ACCURACY, examples.EXAMPLES, examples.INITIAL, examples.FEED, drift.CHECK, claims.CHECK)
WORDS = {True: "holds", False: "FAILS", None: "not shown here"}


def run(
    out: str | Path,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    quick: bool = False,
    device: str = "auto",
    data_dir: str | Path | None = None,
) -> dict:
    """Check everything, leave parity.json and parity.html in out, and return what parity.json holds.

    seeds: of each recipe's trainings and of the lecture's experiment. quick: one seed of QUICK's trainings, and without
    the experiment; the files are then parity-quick.json and .html. device, data_dir: as of `train`; auto takes GPUs
    only where there are DEVICES of them. Trainings that are done, by the same code and libraries, are not repeated:
    each set of these has a folder of its own in out. A training that fails is a finding.
    Raises, before anything is trained, UsageError for devices that cannot be and an out that another parity is writing
    to, and Error where the data cannot be had.
    """
    with _locked(out):
        ctx = _contexts(device)
        kind = ctx[0].device_type
        data = {name: datasets.load(name, data_dir) for name in ("mnist", "fashion-mnist")}
        seeds, recipes = (QUICK_SEEDS, QUICK) if quick else (tuple(seeds), RECORDED)
        folder = Path(out) / f"{kind}-{_code()}"
        mx.random.seed(seeds[0])
        findings = [
            *examples.check(ctx, data["mnist"], data_dir),
            *claims.placed(ctx[:2]),
            *claims.shared_unevenly(ctx[:2], data["mnist"]),
        ]
        drifted = _drift(ctx[:2], data["fashion-mnist"])
        findings += drift.check(drifted)
        trained, failed = _trainings(recipes, seeds, folder, kind, data_dir)
        accuracy = {recipe: _held(recipe, runs) for recipe, runs in trained.items() if runs}
        findings += [*failed, *_within(accuracy)]
        if quick:
            findings += [Finding(claims.CHECK, claim, None, "not asked with --quick") for claim in claims.OF_BATCH_SIZE]
        else:
            experiments = {
                seed: batch_size.run(folder / "batch-size" / f"seed-{seed}", device=kind, data_dir=data_dir, seed=seed)
                for seed in seeds
            }
            findings += claims.batch_size(experiments, kind == "cpu")
        findings = [f for check in CHECKS for f in findings if f.check == check]
        made_by = {
            "gluon_mgpu": __version__,
            "python": platform.python_version(),
            "mxnet": mx.__version__,
            "numpy": np.__version__,
            "devices": {"cpu": "CPU contexts", "gpu": "GPUs"}[kind],
            "seeds": list(seeds),
            "quick": quick,
            "trainings": folder.name,
            "date": datetime.date.today().isoformat(),
        }
        result = {
            "verdict": verdict(findings),
            "holds": not any(finding.failed for finding in findings),
            "made_by": made_by,
            "findings": [finding._asdict() for finding in findings],
            "accuracy": accuracy,
            "drift": drift.as_json(drifted),
        }
        (shown, numbers), html, text = files(out, quick), page.render(result), json.dumps(result, indent=1)
        checkpoint.write_whole(shown, lambda f: f.write(html.encode()))
        checkpoint.write_whole(numbers, lambda f: f.write(text.encode()))
        return result


def files(out: str | Path, quick: bool) -> tuple[Path, Path]:
    """(page, numbers) that `run` leaves."""
    name = "parity-quick" if quick else "parity"
    return Path(out) / f"{name}.html", Path(out) / f"{name}.json"


def verdict(findings: list[Finding]) -> str:
    """One line: whether all holds, or what does not."""
    failed = [finding for finding in findings if finding.failed]
    unshown = sum(finding.holds is None for finding in findings)
    if not failed:
        return f"parity holds: {len(findings) - unshown} of {len(findings)} claims, and {unshown} are not shown here"
    first = "; ".join(f"{f.check}: {f.claim} ({f.figure})" for f in failed[:3])
    return f"parity FAILS: {first}{f'; and {len(failed) - 3} more' * (len(failed) > 3)}"


def table(result: dict) -> str:
    """Lines for a terminal: the verdict, the accuracies with what they may be, and every finding."""
    lines = [result["verdict"]]
    for recipe, found in result["accuracy"].items():
        lines.append(f"\n{recipe:36}" + "".join(f"{f'epoch {e}':>9}" for e in range(1, len(found["notebook"]) + 1)))
        lines.append(f"    {'the notebook':32}" + "".join(f"{a:9.{found['decimals']}f}" for a in found["notebook"]))
        rows = {f"seed {seed}": accuracies for seed, accuracies in found["runs"].items()}
        rows.update({"lowest it could have been": found["low"], "highest": found["high"]})
        lines += [f"    {name:32}" + "".join(f"{value:9.4f}" for value in row) for name, row in rows.items()]
    for check, group in itertools.groupby(result["findings"], lambda finding: finding["check"]):
        lines.append(f"\n{check}")
        lines += [f"    {WORDS[f['holds']]:16}{f['claim']}: {f['figure']}" for f in group]
    return "\n".join(lines)


@contextmanager
def _locked(out: str | Path) -> Iterator[None]:
    """The folder out, made, and locked while this is open."""
    if not str(out):
        raise UsageError("--out '': give a folder, such as runs/parity")
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror}): give another folder") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UsageError(f"--out {out}: another parity is writing there: let it end") from None
    finally:
        os.close(folder)


def _contexts(device: str) -> list[Context]:
    """DEVICES contexts of one kind."""
    if device == "auto" and 0 < mx.context.num_gpus() < DEVICES:
        print(f"gluon_mgpu: parity wants {DEVICES} GPUs and there are fewer: using CPU contexts", file=sys.stderr)
        device = "cpu"
    return devices.contexts(DEVICES, device)


def _drift(ctx: list[Context], data: datasets.Dataset) -> drift.Drift:
    with tqdm(total=drift.STEPS * (7 + drift.ORDERS), desc="drift", unit="step", **_quiet()) as bar:
        return drift.measure(ctx, data, drift.reference(ctx, data, drift.STEPS, bar.update), bar.update)


def _trainings(
    recipes: Sequence[str], seeds: Sequence[int], folder: Path, kind: str, data_dir: str | Path | None
) -> tuple[dict[str, dict[int, list[float]]], list[Finding]]:
    """({recipe: {seed: accuracy by epoch}}, a Finding for each training that failed), trained where not done yet."""
    runs: dict[str, dict[int, list[float]]] = {recipe: {} for recipe in recipes}
    failed = []
    epochs = sum(RECIPES[recipe].options["epochs"] for recipe in recipes) * len(seeds)
    with tqdm(total=epochs, unit="epoch", **_quiet()) as bar:
        for seed, recipe in itertools.product(seeds, recipes):
            name = f"{recipe}, seed {seed}"
            bar.set_description(name)
            options = {**RECIPES[recipe].options, "seed": seed, "device": kind}
            try:
                runs[recipe][seed] = _trained(name, folder / recipe / f"seed-{seed}", options, data_dir, bar.update)
            except Error as error:
                failed.append(Finding(ACCURACY, f"{name} trains to its end", False, str(error)))
            except KeyboardInterrupt:
                tqdm.write("gluon_mgpu: the same command goes on from here", file=sys.stderr)
                raise
            else:
                shown = " ".join(f"{accuracy:.4f}" for accuracy in runs[recipe][seed])
                tqdm.write(f"gluon_mgpu: {name}: test accuracy {shown}", file=sys.stderr)
    return runs, failed


def _trained(
    name: str, folder: Path, options: dict, data_dir: str | Path | None, on_epoch: Callable[..., object]
) -> list[float]:
    """Test accuracy after each epoch of a run in a folder, which is begun, or gone on with, where it is not done."""
    begun = (folder / "config.json").exists()
    done = len(records.last(folder)[-1].history) if begun else 0
    on_epoch(done)
    if done < options["epochs"]:
        own_process.train(name, {**options, "data_dir": data_dir, "resume" if begun else "out": folder}, on_epoch)
    ran, history = records.options(folder), records.last(folder)[-1].history
    wanted = {**options, "gpus": devices.parse(options["gpus"])}
    other = [f"{option} {ran[option]}, not {value}" for option, value in wanted.items() if ran[option] != value]
    if other or len(history) != options["epochs"]:
        raise Error(f"{folder} holds another run ({', '.join(other) or f'{len(history)} epochs'}): remove it")
    return [epoch.test_accuracy for epoch in history]


def _held(recipe: str, runs: dict[int, list[float]]) -> dict:
    """The runs of a recipe beside its record, with the band for each epoch."""
    source, _, recorded, _ = RECIPES[recipe]
    held = bands.of_recipe(recipe, runs)
    return {
        "source": source,
        "notebook": list(recorded),
        "decimals": bands.decimals(recorded),
        "runs": {str(seed): accuracies for seed, accuracies in runs.items()},
        "earlier": bands.kept(recipe),
        "low": [band.low for band in held],
        "high": [band.high for band in held],
        "holds": [band.holds for band in held],
    }


def _within(accuracy: dict[str, dict]) -> Iterator[Finding]:
    """A Finding for each epoch of each record, and one for each of today's runs beside the kept ones."""
    for recipe, found in accuracy.items():
        for epoch, (recorded, low, high, holds) in enumerate(
            zip(*(found[name] for name in ("notebook", "low", "high", "holds"))), 1
        ):
            figure = f"{recorded:.{found['decimals']}f}, {_place(low, high, holds)}"
            yield Finding(ACCURACY, f"{recipe}, epoch {epoch}: the notebook's could be ours", holds, figure)
        for seed, accuracies in found["runs"].items():
            held = bands.among_kept(recipe, accuracies)
            outside = [
                f"epoch {epoch}: {band.recorded:.4f}, {_place(band.low, band.high, False)}"
                for epoch, band in enumerate(held, 1)
                if not band.holds
            ]
            figure = "; ".join(outside) or f"all {len(held)} epochs within the kept runs' bands"
            yield Finding(ACCURACY, f"{recipe}, seed {seed}: learns as the kept runs did", not outside, figure)


def _place(low: float, high: float, holds: bool) -> str:
    return f"{'within' if holds else 'outside'} {low:.4f} to {high:.4f}"


def _code() -> str:
    """What the numbers of a training depend on beside its options, as 8 digits: our code and the libraries under it."""
    digest = hashlib.sha256(f"{mx.__version__} {np.__version__} {platform.python_version()}".encode())
    for path in sorted(Path(__file__).parents[1].glob("*.py")):  # not parity itself, nor what measures
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _quiet() -> dict:
    return {"leave": False, "disable": not sys.stderr.isatty()}
