"""Could one of our runs have printed what a notebook printed? A band of test accuracy for each epoch.

A notebook's run and ours are taken for draws of one distribution. What is compared is the logarithm of the error, 1 -
accuracy, whose spread is about as large above as below. A recorded one holds within

    mean of today's runs +- WIDTH * s * sqrt(1 + 1 / how many there are)

widened by half of the last digit that the accuracy was printed with. s is the spread between seeds at that epoch, or at
the one before or after if that is larger: runs differ most in when they learn. It is pooled from today's runs and those
kept in spread.json, so that a few that happen to agree do not make a band narrow, nor broken ones that differ one wide.
docs/parity.md has the reasoning, and how often the rule is wrong.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gluon_mgpu.recipes import RECIPES

WIDTH = 5  # 4 would raise an alarm at 3% of clean runs of gluon-lenet-mnist-4gpu, which now and then dip; 5 at none
LEAST_ERROR = 1e-4  # of a test set of 10000: where all is right, as if one image were not


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
    runs, earlier = (np.log(np.maximum(1 - np.array(group), LEAST_ERROR)) for group in (runs, earlier))
    squares = sum(((group - group.mean(0)) ** 2).sum(0) for group in (runs, earlier))
    own = np.sqrt(squares / (len(runs) + len(earlier) - 2))
    spread = np.max([own, np.append(own[1:], 0), np.append(0, own[:-1])], axis=0)
    reach = WIDTH * spread * np.sqrt(1 + 1 / len(runs))
    half_digit = 0.5 * 10.0 ** -(decimals(recorded) if digits is None else digits)
    low = 1 - np.exp(runs.mean(0) + reach) - half_digit
    high = 1 - np.exp(runs.mean(0) - reach) + half_digit
    return [Band(*map(float, band)) for band in zip(np.clip(low, 0, 1), np.clip(high, 0, 1), recorded)]


def decimals(printed):
    """How many digits after the point numbers were printed with, a trailing 0 left off."""
    return max(len(str(number).partition(".")[2]) for number in printed)


def of_recipe(recipe, runs):
    """A Band for each epoch of a recipe. runs: {seed: accuracy by epoch}."""
    earlier = [accuracies for seed, accuracies in kept(recipe).items() if int(seed) not in runs]
    return bands(list(runs.values()), RECIPES[recipe].test_accuracy, earlier)
