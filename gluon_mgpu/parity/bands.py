"""Could one of our runs have printed what a notebook printed? A band of test accuracy for each epoch.

A notebook's run is taken for one more draw from the distribution of ours. What is compared is the logarithm of the
error, 1 - accuracy, of which a run that learned badly is not as far off. A recorded one holds within

    mean of today's runs +- WIDTH * s * sqrt(1 + 1 / how many there are)

widened by half of the last digit that the accuracy was printed with. s is the standard deviation between the kept runs
of spread.json at that epoch, or half of that at the next one, if that is more: where all still guess, now and then one
is ahead. Today's runs have no part in s, so that broken ones cannot make the band wide; and each of them is held
against the kept ones by the same rule. docs/parity.md has the reasoning, and how often the rule is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gluon_mgpu.training.recipes import RECIPES

WIDTH = 5  # chosen on the kept runs: with 4, six in 100 clean runs of gluon-lenet-mnist-1gpu would raise an alarm
LEAST_ERROR = 1e-4  # of a test set of 10000: where all is right, as if one image were not


class Band(NamedTuple):
    low: float
    high: float
    recorded: float

    @property
    def holds(self) -> bool:
        return bool(self.low <= self.recorded <= self.high)


@lru_cache
def kept(recipe: str) -> dict[str, list[float]]:
    """{seed: accuracy by epoch} of the runs that spread.json has of a recipe."""
    return json.loads(Path(__file__).with_name("spread.json").read_text())["test_accuracy"][recipe]


def bands(
    runs: Sequence[Sequence[float]],
    recorded: Sequence[float],
    earlier: Sequence[Sequence[float]],
    digits: int | None = None,
) -> list[Band]:
    """A Band for each epoch. runs, earlier: accuracies of so many runs (runs, epochs), of today and kept.

    recorded: those of the notebook (epochs,). digits: after its decimal point; default as many as it shows.
    """
    errors, kept_errors = (np.log(np.maximum(1 - np.array(group), LEAST_ERROR)) for group in (runs, earlier))
    own = kept_errors.std(0, ddof=1)
    reach = WIDTH * np.maximum(own, np.append(own[1:], 0) / 2) * np.sqrt(1 + 1 / len(runs))
    half_digit = 0.5 * 10.0 ** -(decimals(recorded) if digits is None else digits)
    low = 1 - np.exp(errors.mean(0) + reach) - half_digit
    high = 1 - np.exp(errors.mean(0) - reach) + half_digit
    return [Band(*map(float, band)) for band in zip(np.clip(low, 0, 1), np.clip(high, 0, 1), recorded)]


def decimals(printed: Sequence[float]) -> int:
    """How many digits after the point numbers were printed with, a trailing 0 left off."""
    return max(len(str(number).partition(".")[2]) for number in printed)


def of_recipe(recipe: str, runs: dict[int, list[float]]) -> list[Band]:
    """A Band for each epoch of a recipe's record. runs: {seed: accuracy by epoch}."""
    return bands(list(runs.values()), RECIPES[recipe].test_accuracy, list(kept(recipe).values()))


def among_kept(recipe: str, accuracies: Sequence[float]) -> list[Band]:
    """A Band for each epoch of one run of today: of the kept runs, as if it were recorded."""
    earlier = list(kept(recipe).values())
    return bands(earlier, accuracies, earlier, digits=4)
