"""Could a run of this project have printed what a notebook printed? A band of test accuracy for each epoch.

A notebook's run counts as one more draw from the distribution of our runs. Its log error, log(1 - accuracy), must lie
within WIDTH * s * sqrt(1 + 1 / n) of the mean of today's n runs. s is the standard deviation between the runs of
spread.json, so that broken runs cannot widen the band. docs/parity.md has the reasons and the rate of false alarms.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gluon_mgpu.training.recipes import RECIPES

WIDTH = 5  # chosen on the kept runs: with 4, 6% of correct gluon-lenet-mnist-1gpu runs would raise an alarm
LEAST_ERROR = 1e-4  # one of 10,000 test images, so that the logarithm exists if all are classified correctly


class Band(NamedTuple):
    low: float
    high: float
    recorded: float

    @property
    def holds(self) -> bool:
        return bool(self.low <= self.recorded <= self.high)


def kept(recipe: str) -> dict[str, list[float]]:
    """{seed: accuracy by epoch} of the runs of a recipe in spread.json."""
    return json.loads(Path(__file__).with_name("spread.json").read_text())["test_accuracy"][recipe]


def bands(
    runs: Sequence[Sequence[float]], recorded: Sequence[float], kept_runs: Sequence[Sequence[float]], digits: int
) -> list[Band]:
    """One Band per epoch for the recorded accuracies (epochs,), which were printed with `digits` decimals.

    runs, kept_runs: accuracies (runs, epochs). s is at least half of the next epoch's: while nearly all runs still
    guess, a few are already ahead. Half of the last digit is added to the band.
    """
    errors, kept_errors = (np.log(np.maximum(1 - np.array(group), LEAST_ERROR)) for group in (runs, kept_runs))
    s = kept_errors.std(0, ddof=1)
    s = np.maximum(s, np.append(s[1:], 0) / 2)
    reach = WIDTH * s * np.sqrt(1 + 1 / len(runs))
    half_digit = 0.5 * 10.0**-digits
    low = np.clip(1 - np.exp(errors.mean(0) + reach) - half_digit, 0, 1)
    high = np.clip(1 - np.exp(errors.mean(0) - reach) + half_digit, 0, 1)
    return [Band(*map(float, band)) for band in zip(low, high, recorded)]


def decimals(printed: Sequence[float]) -> int:
    """How many decimals the accuracies of a recipe were printed with."""
    return max(len(str(number).partition(".")[2]) for number in printed)


def of_recipe(recipe: str, runs: dict[int, list[float]]) -> list[Band]:
    """One Band per epoch of what the notebook printed for a recipe. runs: {seed: accuracy by epoch}."""
    recorded = RECIPES[recipe].test_accuracy
    return bands(list(runs.values()), recorded, list(kept(recipe).values()), decimals(recorded))


def among_kept(recipe: str, accuracies: Sequence[float]) -> list[Band]:
    """One Band per epoch of one of today's runs, around the mean of the kept runs."""
    kept_runs = list(kept(recipe).values())
    return bands(kept_runs, accuracies, kept_runs, digits=4)
