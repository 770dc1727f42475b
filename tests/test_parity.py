"""Parity's own checks: what they say of this code, of the notebooks' records, and of faults planted in either."""

import itertools
import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import faults
import mxnet as mx
import numpy as np
import pytest

from gluon_mgpu import scratch
from gluon_mgpu.commands.common import main as cli
from gluon_mgpu.parity import bands, claims, drift, examples
from gluon_mgpu.parity import run as whole
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import batch_size, datasets, recipes, records

ROOT = Path(__file__).parents[1]
CTX = [mx.cpu(i) for i in range(4)]
STEPS = 6  # enough for every fault; parity itself takes 200


def failed(findings):
    return {finding.check for finding in findings if finding.failed}


@pytest.fixture(scope="module")
def made():
    return datasets.synthetic(6000, 1000)


@pytest.fixture
def small(made, monkeypatch):
    """In place of both data sets."""
    monkeypatch.setattr(datasets, "load", lambda name, *_: made)
    return made


@pytest.fixture(scope="module")
def reference(made):
    return drift.reference(CTX[:2], made, STEPS)


def checked(small, reference):
    """Every check but the trainings."""
    mx.random.seed(1)
    for impl in examples.IMPLS:
        yield from examples.printed(impl, CTX, small)
        yield from examples.initial(impl, CTX)
    yield from examples.fed(CTX[:2], None)
    yield from claims.shared_unevenly(CTX[:2], small)
    yield from claims.placed(CTX[:2])
    yield from drift.check(drift.measure(CTX[:2], small, reference))


def test_nothing_fails_in_the_code_as_it_is(small, reference):
    findings = list(checked(small, reference))
    assert len(findings) > 30 and failed(findings) == set()


# Fault: the checks that catch it in scratch, in highlevel, and in what both are fed. docs/parity.md has this table.
SUM, STEP = {examples.EXAMPLES, drift.CHECK}, {drift.CHECK}
CAUGHT = {
    "gradients_not_summed": SUM,
    "gradients_averaged": SUM,
    "divided_by_the_shards_size": STEP,
    "one_shard_for_all": SUM,
    "one_replica_not_copied_back": SUM,
    "learning_rate_a_tenth": STEP,
    "no_shuffling": {examples.FEED},
    "initial_scale_ten_times_larger": {examples.INITIAL},
    "biases_not_updated": SUM,
}


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_a_planted_fault_is_caught_in_each_implementation(fault, small, reference, monkeypatch):
    faults.FAULTS[fault](monkeypatch.setattr)
    findings = [finding for finding in checked(small, reference) if finding.check != claims.CHECK]
    for impl in examples.IMPLS:
        of_impl = [f for f in findings if f.claim.startswith(impl) or f.check == examples.FEED]
        print([f for f in of_impl if not f.holds])
        assert failed(of_impl) == CAUGHT[fault]


def test_a_run_that_differs_from_one_implementation_alone_is_told_from_the_other(small, reference, monkeypatch):
    def only_scratch(owner, name, value):
        if owner is faults.scratch.Replicas:
            monkeypatch.setattr(owner, name, value)

    faults.FAULTS["biases_not_updated"](only_scratch)
    findings = list(drift.check(drift.measure(CTX[:2], small, reference)))
    assert {f.claim.partition(" over")[0].partition(",")[0] for f in findings if not f.holds} == {
        "scratch and highlevel",
        "scratch and the notebook's code",
    }


def alarms(runs, recorded, earlier, digits=4):
    return sum(not band.holds for band in bands.bands(runs, recorded, earlier, digits))


def drawn(rng, *shape, spread, error=0.3):
    """Accuracies of runs whose errors are log-normal."""
    return 1 - error * np.exp(spread * rng.standard_normal(shape))


def log_widths(runs, earlier):
    """How wide the bands are in the logarithm of the error."""
    recorded = (0.7,) * len(runs[0])
    return [np.log((1 - band.low) / (1 - band.high)) for band in bands.bands(runs, recorded, earlier, 9)]


def test_a_band_is_wide_where_runs_spread_and_narrow_where_they_agree():
    earlier = drawn(np.random.default_rng(0), 17, 4, spread=[0.02, 0.2, 0.02, 0])
    widths = log_widths(earlier[:3], earlier)
    assert widths[0] == pytest.approx(widths[1] / 2)  # where all still guess, now and then one is ahead
    assert widths[1] > 5 * widths[2] > 0 and widths[3] < 1e-6


def test_todays_runs_have_no_part_in_how_wide_a_band_is():
    earlier = drawn(np.random.default_rng(1), 17, 1, spread=0.1)
    agree, wild = ([[0.7], [0.7], [0.7]], [[0.5], [0.7], [0.9]])
    assert log_widths(agree, earlier) == pytest.approx(log_widths(wild, earlier))


@pytest.mark.parametrize("recipe", whole.RECORDED)
def test_one_run_of_three_that_never_learns_fails_whatever_the_others_do(recipe):
    epochs = len(recipes.RECIPES[recipe].test_accuracy)
    assert not all(band.holds for band in bands.among_kept(recipe, [0.1] * epochs))
    for accuracies in bands.kept(recipe).values():
        assert all(band.holds for band in bands.among_kept(recipe, accuracies))


def test_a_band_is_that_of_the_formula():
    runs, earlier = [[0.7], [0.8]], [[0.68], [0.7], [0.74]]
    today, kept = np.log([0.3, 0.2]), np.log([0.32, 0.3, 0.26])
    (band,) = bands.bands(runs, (0.75,), earlier)
    reach = 5 * np.sqrt(np.var(kept) * 3 / 2) * np.sqrt(3 / 2)
    assert band.high == pytest.approx(1 - np.exp(today.mean() - reach) + 0.005)
    assert band.low == pytest.approx(max(0, 1 - np.exp(today.mean() + reach) - 0.005))


def test_a_recorded_accuracy_may_be_off_by_half_its_last_digit():
    runs, earlier = [[0.746], [0.746]], [[0.746]] * 5
    assert alarms(runs, (0.75,), earlier, 2) == 0 and alarms(runs, (0.76,), earlier, 2) == 1
    assert bands.decimals((0.1, 0.66)) == 2 and bands.decimals((0.9685, 0.98)) == 4


@pytest.mark.parametrize("recipe", whole.RECORDED)
def test_none_of_the_kept_runs_in_the_notebooks_place_raises_an_alarm(recipe):
    kept = list(bands.kept(recipe).values())
    assert len(kept) == 17
    for i, run in enumerate(kept):
        others = kept[i + 1 :] + kept[:i]
        assert alarms(others[:3], run, others, bands.decimals(recipes.RECIPES[recipe].test_accuracy)) == 0


@pytest.mark.parametrize("recipe", whole.RECORDED)
def test_of_all_ways_to_draw_the_notebooks_run_and_todays_from_the_kept_ones_under_one_in_100_raises_an_alarm(recipe):
    kept = np.array([*bands.kept(recipe).values()])
    digits = bands.decimals(recipes.RECIPES[recipe].test_accuracy)
    found, ways = 0, 0
    for record in range(len(kept)):
        others = [i for i in range(len(kept)) if i != record]
        for today in itertools.combinations(others, 3):
            found += alarms(kept[list(today)], kept[record], kept[others], digits) > 0
            ways += 1
    print(f"{recipe}: {found} of {ways}")
    assert found < ways / 100


SMALL = recipes.Recipe(
    "a test",
    {"impl": "scratch", "model": "lenet", "dataset": "synthetic", "gpus": "2", "batch_size": 64, "lr": 0.1}
    | {"epochs": 2, "limit": 300},
    (0.1, 0.1),
)


def shrink(replace, recorded=(0.1, 0.1)):
    """Make parity a matter of seconds: two seeds of one small recipe, a few steps, synthetic data."""
    load = datasets.load
    replace(datasets, "load", lambda name, *_: load("synthetic", limit=6000))
    replace(whole, "QUICK", ("small",))
    replace(whole, "QUICK_SEEDS", (1, 2))
    replace(bands, "kept", lambda recipe: {"1001": [0.1, 0.2], "1002": [0.2, 0.1]})
    replace(drift, "STEPS", 2)
    recipes.RECIPES["small"] = SMALL._replace(test_accuracy=recorded)


def parity(out, *options, recorded=(0.1, 0.1), **streams):
    """The command in a process of its own, made small."""
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import gluon_mgpu
        gluon_mgpu.configure(contexts=4)
        import test_parity
        test_parity.shrink(setattr, {recorded})
        test_parity.cli.parity(["--quick", "--device", "cpu", "--out", {str(out)!r}])
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], text=True, **streams)


def ended(process):
    said, errors = process.communicate(timeout=120)
    return process.returncode, said.splitlines(), errors


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def test_parity_says_first_whether_all_holds_and_leaves_its_numbers_and_a_page(tmp_path):
    status, lines, errors = ended(parity(tmp_path, **PIPES))
    assert status == 0 and errors.count("\n") == 2 and "small, seed 2: test accuracy 0.1" in errors
    result = json.loads((tmp_path / "parity-quick.json").read_text())
    assert lines[0] == result["verdict"] and lines[0].startswith("parity holds")
    assert result["verdict"] in (tmp_path / "parity-quick.html").read_text()
    runs = result["accuracy"]["small"]["runs"]
    (folder,) = tmp_path.glob("cpu-*/small")
    for seed in ("1", "2"):
        kept = [json.loads(line) for line in (folder / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()]
        assert runs[seed] == [epoch["test_accuracy"] for epoch in kept]
    trained = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    status, lines, errors = ended(parity(tmp_path, recorded=(0.1, 0.97), **PIPES))
    assert status == 1
    assert lines[0].startswith("parity FAILS: accuracy: small, epoch 2: the notebook's could be ours (0.97, outside ")
    assert json.loads((tmp_path / "parity-quick.json").read_text())["holds"] is False
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == trained


def test_after_ctrl_c_parity_goes_on_without_repeating_a_training_that_was_done(tmp_path):
    process = parity(tmp_path, **PIPES, start_new_session=True)
    deadline = time.monotonic() + 100
    while not [*tmp_path.glob("cpu-*/small/seed-2/config.json")]:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    status, lines, errors = ended(process)
    assert (status, lines) == (130, []) and "the same command goes on from here" in errors
    assert [path.name for path in tmp_path.glob("parity.*")] == []
    first = next(tmp_path.glob("cpu-*/small/seed-1"))
    trained = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    status, lines, errors = ended(parity(tmp_path, **PIPES))
    assert status == 0 and "resuming" in errors
    assert {path: path.stat().st_mtime_ns for path in first.iterdir()} == trained


def test_a_training_that_fails_is_a_finding_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setitem(recipes.RECIPES, "small", SMALL)
    monkeypatch.setitem(recipes.RECIPES, "diverges", SMALL._replace(options={**SMALL.options, "lr": 1e30}))
    runs, failed = whole._trainings(("diverges", "small"), (1,), tmp_path, "cpu", None)
    assert runs["diverges"] == {} and len(runs["small"][1]) == 2
    (finding,) = failed
    assert finding.failed and "diverges, seed 1" in finding.claim and "training stopped" in finding.figure


def test_a_folder_that_holds_another_run_is_not_taken_for_the_one_asked_for(tmp_path):
    scratch.train(2, 64, 0.1, device="cpu", dataset="synthetic", limit=300, epochs=2, seed=1, out=tmp_path / "run")
    asked = {**SMALL.options, "seed": 1, "device": "cpu"}
    assert len(whole._trained("small", tmp_path / "run", asked, None, lambda done: None)) == 2
    for changed, says in (({"lr": 0.2}, "lr 0.1, not 0.2"), ({"gpus": "1"}, r"gpus \[0, 1\], not \[0\]")):
        with pytest.raises(Error, match=f"holds another run .{says}.: remove it"):
            whole._trained("small", tmp_path / "run", {**asked, **changed}, None, lambda done: None)


@pytest.mark.parametrize(
    "out, says", [("", "give a folder"), ("a-file", "cannot be written"), ("locked", "let it end")]
)
def test_an_out_that_cannot_be_is_refused_before_anything_is_asked(out, says, tmp_path, capsys, monkeypatch):
    (tmp_path / "a-file").touch()
    (tmp_path / "locked").mkdir()
    monkeypatch.chdir(tmp_path)
    with whole._locked("locked"), pytest.raises(SystemExit) as exit:
        cli.parity(["--out", out])
    said = capsys.readouterr()
    assert (exit.value.code, said.out, said.err.count("\n")) == (2, "", 1) and says in said.err


@pytest.mark.parametrize("asked", ["0", "x", "3,3", "-1", ""])
def test_seeds_that_cannot_be_are_refused_in_a_line(asked, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.parity(["--seeds", asked])
    assert exit.value.code == 2 and "give how many seeds (3) or which ones (4,7)" in capsys.readouterr().err


def experiment(*curves, seconds=(10, 6, 6, 6)):
    """As `batch_size.run` gives it: 1 device; 2 devices; at twice the batch; with the learning rate doubled too."""
    return [
        batch_size.Result(r, {}, [records.Epoch(e, s, 1.0, 1.0, a, 0.2) for e, a in enumerate(curve, 1)])
        for r, curve, s in zip(batch_size.RUNS, curves, seconds)
    ]


def holding(experiments, cpu=True):
    return [finding.holds for finding in claims.batch_size(experiments, cpu)]


def test_the_lectures_claims_hold_where_every_seed_shows_them_and_are_not_shown_where_seeds_differ():
    one = (0.1, 0.6, 0.7, 0.75)
    slower, better, worse = (0.1, 0.1, 0.2, 0.5), (0.1, 0.2, 0.4, 0.6), (0.1, 0.1, 0.1, 0.3)
    all_so, mixed, none_so = (
        {seed: experiment(one, one, slower, scaled) for seed, scaled in enumerate(curves)}
        for curves in ([better] * 3, [better, worse, better], [worse] * 3)
    )
    assert holding(all_so) == [True, None, True, True, True]
    assert holding(mixed) == [True, None, True, True, None]
    assert holding(none_so) == [True, None, True, True, False]
    assert holding({1: experiment(one, one, slower, better)}) == [True, None, True, None, None]
    assert holding({seed: experiment(one, one, one, worse) for seed in range(3)})[3] is False


def test_a_second_device_that_learns_less_well_fails_and_times_alone_never_do():
    one = (0.1, 0.6, 0.7, 0.75)
    broken = experiment(one, (0.1, 0.1, 0.1, 0.1), one, one, seconds=(10, 30, 30, 30))
    first, second, third, *_ = claims.batch_size({1: broken}, cpu=True)
    assert first.holds is False and "of 4 outside" in first.figure
    assert (second.holds, third.holds) == (None, None) and "0.33 times as fast" in third.figure
    assert "CPU contexts share the cores" in second.figure


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_clean_run_raises_no_alarm(seed, monkeypatch):
    mx.random.seed(seed)
    monkeypatch.setattr(drift, "SEED", seed)
    mnist, fashion_mnist = datasets.load("mnist"), datasets.load("fashion-mnist")
    drifted = drift.measure(CTX[:2], fashion_mnist, drift.reference(CTX[:2], fashion_mnist, drift.STEPS // 10))
    findings = [*examples.check(CTX, mnist, None), *claims.shared_unevenly(CTX[:2], mnist), *drift.check(drifted)]
    print(*findings, sep="\n")
    assert failed(findings) == set()


# Faults that the bands see in the training of one seed, the record's or the kept runs'; docs/parity.md has this table.
OUTSIDE = {
    "scratch-lenet-fashion-mnist-2gpu": {
        "gradients_not_summed",
        "gradients_averaged",
        "one_replica_not_copied_back",
        "learning_rate_a_tenth",
        "initial_scale_ten_times_larger",
        "biases_not_updated",
    },
    "gluon-lenet-mnist-4gpu": {
        "divided_by_the_shards_size",
        "learning_rate_a_tenth",
        "initial_scale_ten_times_larger",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OUTSIDE)
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_the_bands_see_the_faults_that_change_much_how_well_a_recipe_learns(fault, recipe, tmp_path):
    options = ("--recipe", recipe, "--seed", "1", "--device", "cpu", "--out", str(tmp_path / "run"))
    done = subprocess.run([sys.executable, faults.__file__, fault, *options], capture_output=True, text=True)
    curve = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert done.returncode == 0 or "not a number" in done.stderr, done.stderr
    if done.returncode == 0:
        curve = [epoch.test_accuracy for epoch in records.last(tmp_path / "run")[-1].history]
        held = [band.holds for band in (*bands.of_recipe(recipe, {1: curve}), *bands.among_kept(recipe, curve))]
    print(fault, recipe, curve, done.stderr)
    assert (done.returncode or not all(held)) == (fault in OUTSIDE[recipe])


def test_the_documents_table_of_faults_is_what_these_tests_find():
    text = (Path(__file__).parents[1] / "docs" / "parity.md").read_text()
    lines = text[text.index("| fault |") :].splitlines()[2:11]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    for fault, (_, caught, *outside) in zip(CAUGHT, rows):
        assert set(caught.split(", ")) == CAUGHT[fault], fault
        assert outside == ["yes" if fault in seen else "no" for seen in OUTSIDE.values()], fault
