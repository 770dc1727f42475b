"""Bands of test accuracy per epoch: could a run of this project have printed a notebook's accuracies?

A notebook's log error, log(1 - accuracy), must be within WIDTH * s * sqrt(1 + 1 / n) of the mean log error of n new
runs. s is the standard deviation of the log errors in spread.json, which come from earlier runs, the "kept runs".
See docs/parity.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WIDTH = 5  # chosen from the kept runs: a width of 4 would reject 6% of correct gluon-lenet-mnist-1gpu runs
LEAST_ERROR = 1e-4  # 1 of 10,000 test images; keeps the logarithm finite if all images are classified correctly
DIGITS = 4  # decimal places of the accuracies of this project's runs

Runs = Sequence[Sequence[float]]  # accuracies (runs, epochs)


def kept(recipe: str) -> Runs:
    """Read the accuracies of a recipe's kept runs."""
    return [*json.loads(Path(__file__).with_name("spread.json").read_text())["test_accuracy"][recipe].values()]


def bands(runs: Runs, kept_runs: Runs, digits: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute the lowest and the highest possible accuracy (epochs,), printed with `digits` decimal places.

    s is raised to at least half of the next epoch's s: while nearly all networks still guess, s underestimates the
    spread. The band is widened by half a unit of the last printed digit.
    """
    errors, kept_errors = (np.log(np.maximum(1 - np.array(group), LEAST_ERROR)) for group in (runs, kept_runs))
    s = kept_errors.std(0, ddof=1)
    s = np.maximum(s, np.append(s[1:], 0) / 2)
    reach = WIDTH * s * np.sqrt(1 + 1 / len(runs))
    low, high = 1 - np.exp(errors.mean(0) + reach), 1 - np.exp(errors.mean(0) - reach)
    half_digit = 0.5 * 10.0**-digits
    return np.clip(low - half_digit, 0, 1), np.clip(high + half_digit, 0, 1)


def decimals(printed: Sequence[float]) -> int:
    """The largest number of decimal places in printed accuracies."""
    return max(len(str(number).partition(".")[2]) for number in printed)


def judge(accuracies: Sequence[float], low: np.ndarray, high: np.ndarray) -> tuple[bool, str]:
    """Returns whether the accuracies of all epochs are within their bands, and the evidence."""
    epochs = [*zip(accuracies, low, high)]
    evidence = ", ".join(f"{accuracy:.4g} ({a:.4f} to {b:.4f})" for accuracy, a, b in epochs)
    return all(a <= accuracy <= b for accuracy, a, b in epochs), evidence
