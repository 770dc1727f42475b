"""The bands of test accuracy: the formula, and how often they raise a false alarm on the kept runs."""

import itertools

import numpy as np
import pytest
from parity import bands
from parity.run import RECORDED

from gluon_mgpu.training.recipes import RECIPES


def test_a_band_follows_the_formula_and_allows_for_the_rounding_of_the_recorded_accuracy():
    runs, kept = [[0.7], [0.8]], [[0.68], [0.7], [0.74]]
    today, log_kept = np.log([0.3, 0.2]), np.log([0.32, 0.3, 0.26])
    (band,) = bands.bands(runs, (0.75,), kept, bands.decimals((0.1, 0.75)))
    reach = 5 * np.sqrt(np.var(log_kept) * 3 / 2) * np.sqrt(3 / 2)
    assert band.high == pytest.approx(1 - np.exp(today.mean() - reach) + 0.005)
    assert band.low == pytest.approx(max(0, 1 - np.exp(today.mean() + reach) - 0.005))


def test_a_band_is_as_wide_as_kept_runs_differ_or_half_as_wide_as_the_next():
    spread = np.array([0.02, 0.2, 0.02, 0])
    kept = 1 - 0.3 * np.exp(spread * np.random.default_rng(0).standard_normal((17, 4)))  # errors are log-normal
    widths = [np.log((1 - band.low) / (1 - band.high)) for band in bands.bands(kept[:3], [0.7] * 4, kept, digits=9)]
    assert widths[0] == pytest.approx(widths[1] / 2)
    assert widths[1] > 5 * widths[2] > 0 and widths[3] < 1e-6


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
    found, ways = 0, 0
    for record in range(len(kept)):
        rest = [i for i in range(len(kept)) if i != record]
        for today in itertools.combinations(rest, 3):
            held = bands.bands(kept[list(today)], kept[record], kept[rest], digits)
            found += not all(band.holds for band in held)
            ways += 1
    print(f"{recipe}: {found} of {ways}")
    assert found < ways / 100
