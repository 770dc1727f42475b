"""Parity as a whole: what the checks report on this code, on the notebooks' recorded values and on planted faults."""

import functools
import itertools
import json

import mxnet as mx
import numpy as np
import pytest
from batch_size import experiment as lecture
from forks import forked
from mxnet.gluon import Trainer
from parity import bands, claims, drift, examples
from parity import run as whole
from parity.cli import parity
from parity.run import RECORDED
from runs import call

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.data import datasets
from gluon_mgpu.training import recipes
from gluon_mgpu.training.folder import Epoch
from gluon_mgpu.training.recipes import RECIPES

CTX = [mx.cpu(i) for i in range(4)]
DATA = datasets.synthetic(6000, 1000)
STEPS = 2  # enough for every fault; parity itself takes more


def failed(findings):
    return {finding.check for finding in findings if finding.holds is False}


@pytest.fixture(scope="module")
def reference():
    return drift.reference(CTX[:2], DATA, STEPS)


def check(reference):
    """The findings of the checks that compare each implementation with the notebooks, on a small synthetic data set."""
    mx.random.seed(1)
    return [*examples.check(CTX, DATA), *drift.check(drift.measure(CTX[:2], DATA, reference))]


def test_nothing_fails_without_a_fault(reference):
    findings = [*check(reference), *claims.shared_unevenly(CTX[:2], DATA), *claims.placed(CTX[:2])]
    print(*findings, sep="\n")
    assert len(findings) > 25 and failed(findings) == set()


# Faults. Each is a function that breaks both implementations; `replace` is monkeypatch.setattr.


def gradients_not_summed(replace):
    replace(scratch, "allreduce", lambda data: None)
    replace(Trainer, "_allreduce_grads", lambda trainer: None)


def divided_by_the_shards_size(replace):
    train_batch, step = scratch.train_batch, Trainer.step

    def larger_lr(X, y, device_params, ctx, lr, **options):
        return train_batch(X, y, device_params, ctx, lr * len(ctx), **options)

    replace(scratch, "train_batch", larger_lr)
    replace(Trainer, "step", lambda trainer, n: step(trainer, n / len(trainer._contexts)))


def one_shard_for_all(replace):
    for module in (scratch, highlevel):

        def first_for_all(data, ctx, split_and_load=module.split_and_load):
            shards = split_and_load(data, ctx)
            return [shards[0].as_in_context(c) for c, _ in zip(ctx, shards)]

        replace(module, "split_and_load", first_for_all)


def learning_rate_a_tenth(replace):
    sgd, set_learning_rate = scratch.sgd, Trainer.set_learning_rate
    replace(scratch, "sgd", lambda params, lr, batch_size: sgd(params, lr / 10, batch_size))
    replace(Trainer, "set_learning_rate", lambda trainer, lr: set_learning_rate(trainer, lr / 10))


def biases_not_updated(replace):
    sgd, initialize = scratch.sgd, highlevel.initialize
    replace(scratch, "sgd", lambda params, lr, batch_size: sgd(params[::2], lr, batch_size))

    @functools.wraps(initialize)  # keeps its arguments
    def without_biases(net, *args, **options):
        initialize(net, *args, **options)
        for p in net.collect_params(".*bias").values():
            p.lr_mult = 0

    replace(highlevel, "initialize", without_biases)


# {fault: the checks that catch it, in both implementations}.
SUM, STEP = {examples.EXAMPLES, drift.CHECK}, {drift.CHECK}
CAUGHT = {
    gradients_not_summed: SUM,
    divided_by_the_shards_size: STEP,
    one_shard_for_all: SUM,
    learning_rate_a_tenth: STEP,
    biases_not_updated: SUM,
}


# One fault in how gradients are combined and one in the update are enough for the normal suite.
FAST = (gradients_not_summed, learning_rate_a_tenth)


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] * (f not in FAST)) for f in CAUGHT])
def test_a_planted_fault_is_caught_in_each_implementation(fault, reference, monkeypatch):
    fault(monkeypatch.setattr)
    findings = check(reference)
    for impl in examples.MODELS:
        of_impl = [f for f in findings if f.claim.startswith(impl)]
        print(*of_impl, sep="\n")
        assert failed(of_impl) == CAUGHT[fault]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 21))
def test_correct_code_raises_no_alarm_with_any_seed(seed, monkeypatch):
    mx.random.seed(seed)
    monkeypatch.setattr(drift, "SEED", seed)
    mnist, fashion_mnist = datasets.load("mnist"), datasets.load("fashion-mnist")
    drifted = drift.measure(CTX[:2], fashion_mnist, drift.reference(CTX[:2], fashion_mnist, 20))
    findings = [*examples.check(CTX, mnist), *claims.shared_unevenly(CTX[:2], mnist), *drift.check(drifted)]
    print(*findings, sep="\n")
    assert failed(findings) == set()


# The whole command, on a small scale
def add_recipe(monkeypatch, name, accuracy=(0.1, 0.1), **options):
    """Add a recipe that trains briefly and has two made-up kept runs."""
    small = {"impl": "scratch", "dataset": "synthetic", "gpus": 2, "batch_size": 64, "lr": 0.1, "limit": 300}
    monkeypatch.setattr(bands, "kept", lambda recipe: {"1001": [0.1, 0.2], "1002": [0.2, 0.1]})
    monkeypatch.setitem(recipes.RECIPES, name, recipes.Recipe("a test", {**small, "epochs": 2, **options}, accuracy))


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_parity_trains_once_and_reports_what_it_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets, "load", lambda *_: DATA)
    monkeypatch.setattr(drift, "STEPS", STEPS)
    monkeypatch.setattr(whole, "QUICK", ("small",))
    monkeypatch.setattr(whole, "QUICK_SEEDS", (1, 2))

    def run():
        """(exit status, first line, parity-quick.json)."""
        status, out, _ = call(capsys, parity, "--quick", "--device", "cpu", "--out", tmp_path)
        return status, out.splitlines()[0], json.loads((tmp_path / "parity-quick.json").read_text())

    add_recipe(monkeypatch, "small")
    status, first, result = run()
    assert status == 0 and result["holds"] and first == result["verdict"]
    assert (tmp_path / "parity-quick.png").read_bytes().startswith(b"\x89PNG")
    (folder,) = tmp_path.glob("cpu-*/small")
    for seed, accuracies in result["accuracy"]["small"]["runs"].items():
        kept = [json.loads(line) for line in (folder / f"seed-{seed}" / "metrics.jsonl").read_text().splitlines()]
        assert accuracies == [epoch["test_accuracy"] for epoch in kept]
    trained = times(folder)

    add_recipe(monkeypatch, "small", accuracy=(0.1, 0.97))
    status, first, result = run()
    wrong = [finding["claim"] for finding in result["findings"] if finding["holds"] is False]
    assert status == 1 and not result["holds"] and len(wrong) == 1 and wrong[0] in first
    assert times(folder) == trained


def test_a_training_run_that_fails_is_a_finding_and_the_next_one_is_trained(mxnet, tmp_path, monkeypatch):
    add_recipe(monkeypatch, "diverges", lr=1e30)
    add_recipe(monkeypatch, "small")
    with forked(lecture, mxnet):
        accuracy, findings = whole._train_all(("diverges", "small"), (1,), tmp_path, "cpu", None)
    assert [*accuracy] == ["small"] and len(accuracy["small"]["runs"]["1"]) == 2
    assert [finding.holds for finding in findings if "diverges" in finding.claim] == [False]


# The claims of the lecture


def experiment(one, two, large, scaled):
    """What `lecture.run` returns: 1 and 2 devices, both with twice the batch, and with twice the learning rate."""
    curves = (one, two, large, large, scaled)
    return [
        lecture.Result(r, {}, [Epoch(e, s, 1.0, 1.0, a, 0.2) for e, a in enumerate(curve, 1)])
        for r, curve, s in zip(lecture.RUNS, curves, (10, 6, 10, 6, 6))
    ]


def holding(experiments):
    return [finding.holds for finding in claims.batch_size(experiments, cpu=True)]


def test_a_claim_about_learning_needs_three_seeds_that_agree():
    one = (0.1, 0.6, 0.7, 0.75)
    slower, better, worse = (0.1, 0.1, 0.2, 0.5), (0.1, 0.2, 0.4, 0.6), (0.1, 0.1, 0.1, 0.3)
    all_agree, mixed, all_deny = (
        [experiment(one, one, slower, scaled) for scaled in curves]
        for curves in ([better] * 3, [better, worse, better], [worse] * 3)
    )
    assert holding(all_agree) == [True, None, True, True, True]
    assert holding(mixed) == [True, None, True, True, None]
    assert holding(all_deny) == [True, None, True, True, False]
    assert holding([experiment(one, one, slower, better)]) == [True, None, True, None, None]
    assert holding([experiment(one, one, one, worse)] * 3)[3] is False


@pytest.mark.parametrize("recipe", RECORDED)
def test_a_run_that_never_learns_is_outside_and_every_kept_run_within(recipe):
    kept = bands.kept(recipe).values()
    assert len(kept) == 17
    for accuracies in kept:
        assert all(band.holds for band in bands.among_kept(recipe, accuracies))
    assert not all(band.holds for band in bands.among_kept(recipe, [0.1] * len(accuracies)))


@pytest.mark.parametrize("recipe", RECORDED)
def test_fewer_than_1_in_100_ways_to_draw_the_notebook_and_todays_runs_from_the_kept_ones_raises_an_alarm(recipe):
    kept = np.array([*bands.kept(recipe).values()])
    digits = bands.decimals(RECIPES[recipe].test_accuracy)
    alarms, ways = 0, 0
    for record in range(len(kept)):
        rest = [i for i in range(len(kept)) if i != record]
        for today in itertools.combinations(rest, 3):
            held = bands.bands(kept[list(today)], kept[record], kept[rest], digits)
            alarms += not all(band.holds for band in held)
            ways += 1
    print(f"{recipe}: {alarms} of {ways}")
    assert alarms < ways / 100
