"""Parity's own checks: what they say of this code, of the notebooks' records, and of faults planted in either."""

from pathlib import Path

import faults
import mxnet as mx
import pytest

from gluon_mgpu.parity import claims, drift, examples

ROOT = Path(__file__).parents[1]
CTX = [mx.cpu(i) for i in range(4)]
STEPS = 6  # enough for every fault; parity itself takes 200


def failed(findings):
    return {finding.check for finding in findings if finding.holds is False}


@pytest.fixture(scope="module")
def small():
    """In place of both data sets."""
    made = examples.datasets.synthetic(6000, 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples.datasets, "load", lambda name, *_: made)
        yield made


@pytest.fixture(scope="module")
def reference(small):
    return drift.reference(CTX[:2], None, STEPS)


def checked(small, reference):
    """Every check but the trainings."""
    mx.random.seed(1)
    for impl in examples.IMPLS:
        yield from examples.printed(impl, CTX, small)
        yield from examples.initial(impl, CTX)
    yield from examples.fed(CTX[:2], None)
    yield from claims.shared_unevenly(CTX[:2], None)
    yield from claims.placed(CTX[:2])
    yield from drift.check(drift.measure(CTX[:2], None, reference))


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
