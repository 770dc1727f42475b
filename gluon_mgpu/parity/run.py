"""The whole of parity: checks in this process, each training in one of its own, a table, parity.json and a page."""

import datetime
import hashlib
import itertools
import json
import platform
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from gluon_mgpu import __version__, batch_size, checkpoint, datasets, devices, engine, own_process, records
from gluon_mgpu.recipes import RECIPES

engine.configure()

import mxnet as mx  # noqa: E402

from gluon_mgpu.parity import bands, claims, drift, examples, page  # noqa: E402
from gluon_mgpu.parity.finding import Finding  # noqa: E402

ACCURACY = "accuracy"
DEVICES = 4  # that the largest recipe wants
RECORDED = tuple(name for name, recipe in RECIPES.items() if recipe.test_accuracy)
QUICK = ("scratch-lenet-fashion-mnist-2gpu", "gluon-lenet-mnist-4gpu")
QUICK_SEEDS = (1,)
CHECKS = (ACCURACY, examples.EXAMPLES, examples.INITIAL, examples.FEED, drift.CHECK, claims.CHECK)
WORDS = {True: "holds", False: "FAILS", None: "not shown here"}


def run(out, *, seeds=(1, 2, 3), quick=False, device="auto", data_dir=None):
    """Check everything, leave parity.json and parity.html in out, and return what parity.json holds.

    seeds: of each recipe's trainings and of the lecture's experiment. quick: one seed of QUICK's trainings, and without
    the experiment. device, data_dir: as of `train`; auto takes GPUs only where there are DEVICES of them. Trainings
    that are done, by the same code and libraries, are not repeated: each set of these has a folder of its own in out.
    Raises what `devices.contexts` and `datasets.load` raise, before anything is trained, then what a training does.
    """
    out = Path(out)
    ctx = _contexts(device)
    kind = ctx[0].device_type
    for name in {RECIPES[recipe].options["dataset"] for recipe in RECORDED}:
        datasets.load(name, data_dir)
    seeds, recipes = (QUICK_SEEDS, QUICK) if quick else (tuple(seeds), RECORDED)
    folder = out / f"{kind}-{_code()}"
    mx.random.seed(seeds[0])
    findings = [
        *examples.check(ctx, data_dir),
        *claims.placed(ctx[:2]),
        *claims.shared_unevenly(ctx[:2], data_dir),
    ]
    drifted = _drift(ctx[:2], data_dir)
    findings += drift.check(drifted)
    try:
        accuracy = _accuracy(recipes, seeds, folder, kind, data_dir)
        experiments = {} if quick else _experiments(seeds, folder, kind, data_dir)
    except KeyboardInterrupt:
        print("gluon_mgpu: the same command goes on from here", file=sys.stderr)
        raise
    findings += _within(accuracy)
    if experiments:
        findings += claims.batch_size(experiments, kind == "cpu")
    else:
        findings += [Finding(claims.CHECK, claim, None, "not asked with --quick") for claim in claims.OF_BATCH_SIZE]
    findings = [f for check in CHECKS for f in findings if f.check == check]
    made_by = {
        "gluon_mgpu": __version__,
        "python": platform.python_version(),
        "mxnet": mx.__version__,
        "numpy": np.__version__,
        "devices": {"cpu": "CPU contexts", "gpu": "GPUs"}[kind],
        "seeds": list(seeds),
        "quick": quick,
        "date": datetime.date.today().isoformat(),
    }
    result = {
        "verdict": verdict(findings),
        "holds": all(finding.holds is not False for finding in findings),
        "made_by": made_by,
        "findings": [finding._asdict() for finding in findings],
        "accuracy": accuracy,
        "drift": drift.as_json(drifted),
    }
    for name, text in (("parity.json", json.dumps(result, indent=1)), ("parity.html", page.render(result))):
        checkpoint.write_whole(out / name, lambda file, text=text: file.write(text.encode()))
    return result


def verdict(findings):
    """One line: whether all holds, or what does not."""
    failed = [finding for finding in findings if finding.holds is False]
    unshown = sum(finding.holds is None for finding in findings)
    if not failed:
        return f"parity holds: {len(findings) - unshown} of {len(findings)} claims, and {unshown} are not shown here"
    first = "; ".join(f"{f.check}: {f.claim} ({f.figure})" for f in failed[:3])
    return f"parity FAILS: {first}{f'; and {len(failed) - 3} more' * (len(failed) > 3)}"


def table(result):
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


def _contexts(device):
    """DEVICES contexts of one kind."""
    if device == "auto" and 0 < mx.context.num_gpus() < DEVICES:
        print(f"gluon_mgpu: parity wants {DEVICES} GPUs and there are fewer: using CPU contexts", file=sys.stderr)
        device = "cpu"
    return devices.contexts(DEVICES, device)


def _drift(ctx, data_dir):
    with tqdm(total=drift.STEPS * (6 + drift.ORDERS), desc="drift", unit="step", **_quiet()) as bar:
        return drift.measure(ctx, data_dir, drift.reference(ctx, data_dir, drift.STEPS, bar.update), bar.update)


def _accuracy(recipes, seeds, folder, kind, data_dir):
    """{recipe: what the page shows of it}, trained where that is not done yet."""
    runs = {recipe: {} for recipe in recipes}
    epochs = sum(RECIPES[recipe].options["epochs"] for recipe in recipes) * len(seeds)
    with tqdm(total=epochs, unit="epoch", **_quiet()) as bar:
        for seed, recipe in itertools.product(seeds, recipes):
            name = f"{recipe}, seed {seed}"
            bar.set_description(name)
            options = {**RECIPES[recipe].options, "seed": seed, "device": kind, "data_dir": data_dir}
            runs[recipe][seed] = _trained(name, folder / recipe / f"seed-{seed}", options, bar.update)
    return {recipe: _held(recipe, runs[recipe]) for recipe in recipes}


def _trained(name, folder, options, on_epoch):
    """Test accuracy after each epoch of a run in a folder, which is begun, or gone on with, where it is not done."""
    begun = (folder / "config.json").exists()
    done = len(records.last(folder)[-1].history) if begun else 0
    on_epoch(done)
    if done < options["epochs"]:
        own_process.train(name, {**options, "resume" if begun else "out": folder}, on_epoch)
    *_, position = records.last(folder)
    return [epoch.test_accuracy for epoch in position.history]


def _held(recipe, runs):
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


def _within(accuracy):
    """A Finding for each epoch of each recipe."""
    for recipe, found in accuracy.items():
        for epoch, (recorded, low, high, holds) in enumerate(
            zip(*(found[name] for name in ("notebook", "low", "high", "holds"))), 1
        ):
            place = f"{'within' if holds else 'outside'} {low:.4f} to {high:.4f}"
            figure = f"the notebook {recorded:.{found['decimals']}f}, {place}"
            yield Finding(ACCURACY, f"{recipe}, epoch {epoch}", holds, figure)


def _experiments(seeds, folder, kind, data_dir):
    """{seed: what `batch_size.run` gives}."""
    return {
        seed: batch_size.run(folder / "batch-size" / f"seed-{seed}", device=kind, data_dir=data_dir, seed=seed)
        for seed in seeds
    }


def _code():
    """What the numbers of a training depend on beside its options, as 8 digits: our code and the libraries under it."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    digest = hashlib.sha256(f"{mx.__version__} {np.__version__} {platform.python_version()}".encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _quiet():
    return {"leave": False, "disable": not sys.stderr.isatty()}
