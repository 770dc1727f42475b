"""Parity: what the checks report on this code, on the notebooks' recorded values and on planted faults."""

import mxnet as mx
import pytest
from mxnet.gluon import Trainer
from parity import bands, checks, drift, examples, recipes
from parity.checks import RECORDED
from parity.cli import parity
from parity.recipes import RECIPES
from runs import call

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.data import datasets
from gluon_mgpu.training.config import Config

CTX = [mx.cpu(i) for i in range(4)]
DATA = datasets.synthetic(6000, 1000)
STEPS = 1  # enough for every fault; parity itself takes more


def failed(findings):
    return {finding.check for finding in findings if not finding.holds}


def check():
    """The findings of the checks that compare each implementation with the notebooks."""
    mx.random.seed(1)
    findings = [*examples.check(CTX, DATA), *drift.check(CTX[:2], DATA, STEPS)]
    print(*findings, sep="\n")
    return findings


def test_nothing_fails_without_a_fault():
    findings = check()
    assert len(findings) > 15 and failed(findings) == set()


# Faults. Each is a function that breaks both implementations; `replace` is monkeypatch.setattr.


def gradients_not_summed(replace):
    replace(scratch, "allreduce", lambda data: None)
    replace(Trainer, "_allreduce_grads", lambda trainer: None)


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


# {fault: the checks that catch it, in both implementations}
CAUGHT = {
    gradients_not_summed: {examples.EXAMPLES, drift.CHECK},
    one_shard_for_all: {examples.EXAMPLES, drift.CHECK},
    learning_rate_a_tenth: {drift.CHECK},
}
FAST = (gradients_not_summed,)


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] * (f not in FAST)) for f in CAUGHT])
def test_a_planted_fault_is_caught_in_each_implementation(fault, monkeypatch):
    fault(monkeypatch.setattr)
    findings = check()
    for impl in examples.MODELS:
        assert failed([f for f in findings if f.claim.startswith(impl)]) == CAUGHT[fault]


@pytest.mark.slow
def test_the_command_trains_each_run_once_and_names_the_claims_that_fail(tmp_path, monkeypatch, capsys):
    small = {"impl": "scratch", "dataset": "synthetic", "gpus": 2, "batch_size": 64, "limit": 300, "epochs": 2}
    monkeypatch.setattr(bands, "kept", lambda recipe: [[0.1, 0.2], [0.2, 0.1]])  # made up
    monkeypatch.setattr(datasets, "load", lambda *_: DATA)
    monkeypatch.setattr(drift, "STEPS", STEPS)

    def run(**added):
        """(exit status, standard output, {path: time} of the runs named small) with these recipes."""
        for name, recipe in added.items():
            monkeypatch.setitem(RECIPES, name, recipes.Recipe("a test", *recipe))
        monkeypatch.setattr(checks, "QUICK", (*added,))
        status, out, _ = call(capsys, parity, "--quick", "--seeds", 2, "--device", "cpu", "--out", tmp_path)
        return status, out, {path: path.stat().st_mtime_ns for path in tmp_path.rglob("small/**/*")}

    status, out, trained = run(small=({**small, "lr": 0.1}, (0.1, 0.1)))
    assert status == 0 and out.startswith("parity holds")
    assert len([path for path in trained if path.name == "metrics.jsonl"]) == 2
    status, out, again = run(diverges=({**small, "lr": 1e30}, (0.1, 0.1)), small=({**small, "lr": 0.1}, (0.1, 0.97)))
    assert status == 1 and "diverges" in out.splitlines()[0] and again == trained
    failed = [line for line in out.splitlines() if "FAILS  " in line]
    assert ["diverges" in line for line in failed] == [True, True, False] and "0.97" in failed[-1]


def within(accuracies, runs, kept, digits):
    return bands.judge(accuracies, *bands.bands(runs, kept, digits))[0]


@pytest.mark.parametrize("recipe", RECORDED)
def test_every_kept_run_is_within_the_bands_and_one_that_never_learns_is_outside(recipe):
    kept = bands.kept(recipe)
    assert len(kept) == 17
    assert all(within(accuracies, kept, kept, bands.DIGITS) for accuracies in kept)
    assert not within([0.1] * len(kept[0]), kept, kept, bands.DIGITS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_valid_run_with_an_accuracy_per_epoch_or_none(name):
    options = dict(RECIPES[name].options)
    assert options.pop("impl") == ("highlevel" if options["model"] != "lenet" else "scratch")
    assert str(options["gpus"]) in name
    assert len(RECIPES[name].test_accuracy) in (0, Config(**Config.parse(options)).epochs)
