"""The judge, with steps in NumPy: the cause of each mistake is found, and named as the table of causes says."""

import numpy as np
import pytest

from gluon_mgpu.check import evidence, judge
from gluon_mgpu.check.driver import AS_WRITTEN, Driver, Session, StepResult

pytestmark = pytest.mark.filterwarnings("ignore:invalid value")
W = np.random.default_rng(0).normal(size=(30, 4))


class Regression(Driver):
    """Least squares. make: returns a step(w, Xs, ys), which returns the gradient of each device and the losses."""

    def __init__(self, make):
        self.make = make

    def batch(self, i, n):
        rng = np.random.default_rng(i)
        return rng.normal(size=(n, 30)), rng.normal(size=(n, 4))

    def run(self, k, batches, options=AS_WRITTEN):
        dtype, step = "float64" if options.double else "float32", self.make()
        ws = [W.astype(dtype) for _ in range(k)]
        session = Session(start=[{"w": w.astype("float64")} for w in ws])
        try:
            for X, y in batches:
                Xs, ys = (np.array_split(a.astype(dtype), k) for a in (X, y))
                grads, losses = step(ws[0], Xs, ys)
                updates = [-0.1 * grad for grad in grads]
                ws = [w + update for w, update in zip(ws, updates)]
                session.steps.append(StepResult([{"w": u.astype("float64")} for u in updates], losses=losses))
        except AssertionError as error:
            session.failure = str(error)
        return session


def gradients(w, Xs, ys):
    """The gradient of each shard's share of the mean loss."""
    n = sum(map(len, Xs))
    return [X.T @ (X @ w - y) / n for X, y in zip(Xs, ys)]


def summed(change=lambda grad: grad, after=lambda total, k: total, each=lambda total, rank: total, data=lambda *a: a):
    """A step. change: of each gradient, before the sum. after: of the sum, on several devices. each: on each device.
    data: what a device computes of its images and labels."""

    def step(w, Xs, ys):
        k = len(Xs)
        if k > 1:
            Xs, ys = zip(*map(data, Xs, ys))
        total = sum(map(change, gradients(w, Xs, ys)))
        total = after(total, k) if k > 1 else total
        return [each(total, rank) for rank in range(k)], []

    return lambda: step


def scattered(size):
    return lambda total, k: (total * (1 + size * np.sin(1e5 * total.astype("float64")))).astype(total.dtype)


def own(w, Xs, ys):
    return gradients(w, Xs, ys), []


def first_only(w, Xs, ys):
    return gradients(w, Xs, ys)[:1] * len(Xs), []


def weighted(w, Xs, ys):
    return [sum((1 + 0.3 * rank) * grad for rank, grad in enumerate(gradients(w, Xs, ys)))] * len(Xs), []


def means(w, Xs, ys):
    return [sum(gradients(w, [X], [y])[0] for X, y in zip(Xs, ys)) / len(Xs)] * len(Xs), []


def losses_of_others(w, Xs, ys):
    losses = [((X @ w - y) ** 2).sum(axis=1) + len(Xs) for X, y in zip(Xs, ys)]
    return [sum(gradients(w, Xs, ys))] * len(Xs), losses


def first_places(w, Xs, ys):
    X, y, n = np.concatenate(Xs), np.concatenate(ys), sum(map(len, Xs))
    used = n // 2 + len(Xs) - 1
    return [X[:used].T @ (X[:used] @ w - y[:used]) / n] * len(Xs), []


def losses_of_others_on_the_last(w, Xs, ys):
    grads, losses = losses_of_others(w, Xs, ys)
    losses = [a - len(Xs) for a in losses[:-1]] + losses[-1:] if len(Xs) > 1 else [losses[0] - 1]
    return grads, losses


def losses_in_relation(w, Xs, ys):
    """The loss of an example in relation to those of its device."""
    grads, losses = losses_of_others(w, Xs, ys)
    losses = [a - len(Xs) for a in losses]
    return grads, [a / a.mean() for a in losses]


def needs_whole_batches(w, Xs, ys):
    assert sum(map(len, Xs)) > 10, "a batch is too small"
    return [sum(gradients(w, Xs, ys)) * len(Xs)] * len(Xs), []


def leaving():
    """A step that is wrong after three others."""
    count = []

    def step(w, Xs, ys):
        count.append(0)
        return [sum(gradients(w, Xs, ys)) * (len(Xs) if len(count) > 3 else 1)] * len(Xs), []

    return step


def for_some_batches():
    """A step whose shards have the same weight, except for the first batch."""

    def step(w, Xs, ys):
        X = np.concatenate(Xs)
        is_first = np.allclose(X, Regression.batch(None, 0, len(X))[0])
        return (summed()() if is_first else weighted)(w, Xs, ys)

    return step


def of_later_steps_only():
    """nan in the second step, on any number of devices."""
    count = []

    def step(w, Xs, ys):
        count.append(0)
        return [sum(gradients(w, Xs, ys)) * (float("nan") if len(count) == 2 else 1)] * len(Xs), []

    return step


WRONG = {
    evidence.fails_in_parts: lambda: needs_whole_batches,
    evidence.own_gradients: lambda: own,
    evidence.other_losses: lambda: losses_of_others,
    evidence.other_replicas: summed(each=lambda total, rank: total * (1 + rank)),
    evidence.left_by_earlier_steps: leaving,
    evidence.not_finite_update: summed(after=lambda total, k: total * np.float32("inf")),
    evidence.means_of_uneven_shards: lambda: means,
    evidence.a_multiple: summed(after=lambda total, k: total * k),
    evidence.a_penalty_of_each: summed(after=lambda total, k: total + (0.01 * k * W).astype(total.dtype)),
    evidence.some_places_only: lambda: first_places,
    evidence.changed_before_the_sum: summed(change=lambda grad: grad * (abs(grad) > abs(grad).max() / 3)),
    evidence.other_weights: lambda: weighted,
    evidence.labels_of_others: summed(data=lambda X, y: (X, y[::-1])),
    evidence.unknown: summed(after=scattered(0.5)),
}


@pytest.mark.parametrize("cause", WRONG, ids=lambda cause: cause.__name__)
def test_each_cause_is_found_by_its_own_row_of_the_table(cause, monkeypatch):
    found = []

    def noted(claim, function):
        def test(e):
            reason = function(e)
            found.extend([(claim, function)] * bool(reason))
            return reason

        return claim, test

    monkeypatch.setattr(judge, "CAUSES", [noted(*row) for row in evidence.CAUSES])
    report = judge.compare(Regression(WRONG[cause]), (2, 3))
    [(claim, function)] = found
    assert function is cause and report.status == judge.DIFFERENT and report.claims[claim]


@pytest.mark.parametrize("size, words", [(1e-2, "rounding"), (0.5, "look for clipping")])
def test_errors_that_nothing_explains_are_told_by_their_size(size, words):
    report = judge.compare(Regression(summed(after=scattered(size))), (2,))
    assert words in report.claims["update"]


@pytest.mark.parametrize(
    "step, words",
    [(losses_of_others_on_the_last, "losses of device 1 are"), (losses_in_relation, "other examples of its device")],
)
def test_it_is_said_whose_losses_are_wrong_and_what_they_depend_on(step, words):
    assert words in judge.compare(Regression(lambda: step), (2,)).claims["losses"]


def test_a_device_whose_gradients_are_not_used_is_named():
    report = judge.compare(Regression(lambda: first_only), (2,))
    assert "uses only the gradients of device 0" in report.claims["update"]


def test_a_mask_that_leaves_out_the_last_examples_is_not_taken_for_a_choice_of_places():
    masked = Regression.batch(None, 0, 12)[0][-2:, 0]

    def step(w, Xs, ys):
        X, y = np.concatenate(Xs), np.concatenate(ys[::-1])
        used = (np.abs(X[:, :1] - masked) > 1e-3).all(axis=1)
        return [X[used].T @ (X[used] @ w - y[used]) / len(X)] * len(Xs), []

    report = judge.compare(Regression(lambda: step), (2,))
    assert report.status == judge.DIFFERENT and "uses only" not in report.verdict, report.verdict


def test_a_later_step_that_is_wrong_because_of_its_batch_is_judged_as_a_first_one():
    report = judge.compare(Regression(for_some_batches), (2,))
    assert report.status == judge.DIFFERENT and "1.3 × device 1" in report.claims["update"]


@pytest.mark.parametrize(
    "step, claim", [(WRONG[evidence.labels_of_others], "update"), (WRONG[evidence.a_multiple], "devices")]
)
def test_a_device_may_read_all_examples_unless_the_update_is_a_multiple(step, claim):
    driver = Regression(step)
    driver.infers, driver.split = True, lambda k, batch, n: [[*range(n)]] * k
    report = judge.compare(driver, (2,))
    assert [name for name, reason in report.claims.items() if reason] == [claim]


def test_a_right_step_is_accepted_and_taken_once_on_one_device():
    driver, runs = Regression(summed()), []
    driver.run = lambda k, *args: runs.append(k) or Regression.run(driver, k, *args)
    report = judge.compare(driver, (2, 3))
    assert report.status == judge.SAME and not any(report.claims.values())
    assert runs.count(1) == 3 and runs.count(2) == runs.count(3) == 2  # float32, the same again, float64


def test_a_later_step_that_is_not_finite_on_one_device_cannot_be_compared():
    report = judge.compare(Regression(of_later_steps_only), (2,))
    assert report.status == judge.UNKNOWN and report.claims["runs"]
