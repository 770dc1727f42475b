"""Bands of test accuracy per epoch: could a run of this project have printed a notebook's accuracies?

A notebook's log error, log(1 - accuracy), must be within WIDTH * s * sqrt(1 + 1 / n) of the mean log error of n new
runs. s is the standard deviation of the log errors in spread.json, which come from earlier runs, the "kept runs".
docs/parity.md gives the reasons and the false-alarm rate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gluon_mgpu.training.recipes import RECIPES

WIDTH = 5  # chosen from the kept runs: a width of 4 would reject 6% of correct gluon-lenet-mnist-1gpu runs
LEAST_ERROR = 1e-4  # 1 of 10,000 test images; keeps the logarithm finite if all images are classified correctly


class Band(NamedTuple):
    low: float
    high: float
    recorded: float

    @property
    def holds(self) -> bool:
        return bool(self.low <= self.recorded <= self.high)


def kept(recipe: str) -> dict[str, list[float]]:
    """Read {seed: accuracy by epoch} for the kept runs of a recipe."""
    return json.loads(Path(__file__).with_name("spread.json").read_text())["test_accuracy"][recipe]


def bands(
    runs: Sequence[Sequence[float]], recorded: Sequence[float], kept_runs: Sequence[Sequence[float]], digits: int
) -> list[Band]:
    """Compute one Band per epoch for the recorded accuracies (epochs,), which were printed with `digits`
    decimal places.

    runs, kept_runs: accuracies (runs, epochs). s is raised to at least half of the next epoch's s: while nearly all
    networks still guess, s underestimates the spread. The band is widened by half a unit of the last printed digit.
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
    """The largest number of decimal places in printed accuracies."""
    return max(len(str(number).partition(".")[2]) for number in printed)


def of_recipe(recipe: str, runs: Sequence[Sequence[float]]) -> list[Band]:
    """Compute one Band per epoch for the notebook's printed accuracies, around the mean of the new runs."""
    recorded = RECIPES[recipe].test_accuracy
    return bands(runs, recorded, list(kept(recipe).values()), decimals(recorded))


def among_kept(recipe: str, accuracies: Sequence[float]) -> list[Band]:
    """Compute one Band per epoch for a new run, around the mean of the kept runs."""
    kept_runs = list(kept(recipe).values())
    return bands(kept_runs, accuracies, kept_runs, digits=4)
