"""Could one of our runs have printed what a notebook printed? A band of test accuracy for each epoch.

The notebook's run and ours are taken for draws of one distribution, a notebook having been one draw, so a recorded
accuracy lies within

    mean of today's runs +- WIDTH * s * sqrt(1 + 1 / how many there are) +- half of the last digit it was printed with

where s is the spread of that recipe at that epoch between seeds: pooled from today's runs and from those kept in
spread.json, so that a few runs that happen to agree do not make a band narrow, nor broken ones that differ one wide.
docs/parity.md has the reasoning, and how often the rule is wrong.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gluon_mgpu.recipes import RECIPES

WIDTH = 4  # Student's t of some 25 degrees of freedom is beyond it once in 2000 times; a whole parity asks 18 times


class Band(NamedTuple):
    low: float
    high: float
    recorded: float

    @property
    def holds(self):
        return bool(self.low <= self.recorded <= self.high)


@lru_cache
def kept(recipe):
    """{seed: accuracy by epoch} of the runs that spread.json has of a recipe."""
    return json.loads(Path(__file__).with_name("spread.json").read_text())["test_accuracy"][recipe]


def bands(runs, recorded, earlier, digits=None):
    """A Band for each epoch. runs, earlier: accuracies of so many runs (runs, epochs), of today and kept.

    recorded: those of the notebook (epochs,). digits: after its decimal point; default as many as it shows.
    """
    runs, earlier = np.array(runs), np.array(earlier)
    squares = sum(((group - group.mean(0)) ** 2).sum(0) for group in (runs, earlier))
    spread = np.sqrt(squares / (len(runs) + len(earlier) - 2))
    half_digit = 0.5 * 10.0 ** -(decimals(recorded) if digits is None else digits)
    reach = WIDTH * spread * np.sqrt(1 + 1 / len(runs)) + half_digit
    low, high = np.clip([runs.mean(0) - reach, runs.mean(0) + reach], 0, 1)
    return [Band(*map(float, band)) for band in zip(low, high, recorded)]


def decimals(printed):
    """How many digits after the point numbers were printed with, a trailing 0 left off."""
    return max(len(str(number).partition(".")[2]) for number in printed)


def of_recipe(recipe, runs):
    """A Band for each epoch of a recipe. runs: {seed: accuracy by epoch}."""
    earlier = [accuracies for seed, accuracies in kept(recipe).items() if int(seed) not in runs]
    return bands(list(runs.values()), RECIPES[recipe].test_accuracy, earlier)
