"""Parity's report: the text and the picture."""

import pytest
from parity import report
from printed import of_color, pixels

RESULT = {
    "verdict": "parity FAILS: 1 of 2 claims",
    "holds": False,
    "made_by": {"python": "3.11.7", "seeds": [7, 8]},
    "findings": [
        {"check": "examples", "claim": "the sum is 3", "holds": True, "evidence": "it is 3"},
        {"check": "claims", "claim": "it is faster", "holds": None, "evidence": "a CPU cannot show it"},
    ],
    "accuracy": {
        recipe: {
            "source": "A notebook",
            "notebook": [0.11, 0.61],
            "runs": {"1": [0.1003, first], "2": [0.1426, 0.6221]},
            "low": [0.0, 0.3345],
            "high": [0.2381, 0.8863],
        }
        for recipe, first in (("scratch-lenet-fashion-mnist-2gpu", 0.6332), ("gluon-lenet-mnist-4gpu", 0.7151))
    },
    "drift": {
        "step_errors": {"scratch": [1e-5, 2e-5], "highlevel": [0.0, float("nan")]},
        "step_limit": 1e-4,
        "path_errors": {"scratch": [1e-9, 1e-8], "highlevel": [float("inf"), 1e-7]},
        "path_limit": 1e-3,
    },
}


def test_the_text_has_every_number_and_every_finding():
    lines = report.text(RESULT)
    numbers = ["0.11", "0.1003", "0.7151", "0.3345", "0.8863"]
    for cell in [*numbers, "FAILS", "it is 3", "[7, 8]", "gluon-lenet-mnist-4gpu"]:
        assert cell in lines, cell
    assert lines.splitlines()[0] == RESULT["verdict"]


@pytest.mark.parametrize("recipes", [0, 1, 2])
def test_the_picture_shows_each_recipes_band_and_nothing_is_cut_off(recipes):
    accuracy = dict(list(RESULT["accuracy"].items())[:recipes])
    bands = of_color(pixels(report.draw, {**RESULT, "accuracy": accuracy}), "dbe7f3")
    middle = bands.shape[1] // 2
    assert [half.sum() > 10000 for half in (bands[:, :middle], bands[:, middle:])] == [recipes > 0, recipes > 1]
