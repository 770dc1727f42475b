"""Parity's report: the same numbers as text and as a page that a browser can show without anything else."""

import base64
import html
import io
import re

import matplotlib.image
import pytest

from gluon_mgpu.parity import report

HOSTILE = "<script>alert('&amp;')</script>"
RESULT = {
    "verdict": "parity FAILS: gluon-4gpu",
    "holds": False,
    "made_by": {"python": "3.11.7", "seeds": [7, 8]},
    "findings": [
        {"check": "examples", "claim": "the sum is 3", "holds": True, "evidence": "it is 3"},
        {"check": "examples", "claim": HOSTILE, "holds": True, "evidence": "they are"},
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
        for recipe, first in (("scratch-2gpu", 0.6332), ("gluon-4gpu", 0.7151))
    },
    "drift": {
        "step_errors": {"scratch": [1e-5, 2e-5], "highlevel": [0.0, float("nan")]},
        "step_limit": 1e-4,
        "path_errors": {"scratch": [1e-9, 1e-8], "highlevel": [float("inf"), 1e-7]},
        "path_limit": 1e-3,
    },
}


@pytest.fixture(scope="module")
def page():
    return report.page(RESULT)


def test_text_and_page_have_every_number_and_every_finding(page):
    shown, lines = html.unescape(page), report.text(RESULT)
    for cell in ("0.11", "0.1003", "0.7151", "0.3345", "0.8863", "FAILS", "it is 3", "[7, 8]", "gluon-4gpu", HOSTILE):
        assert cell in shown and cell in lines, cell
    assert lines.splitlines()[0] == RESULT["verdict"]


def test_a_browser_runs_and_fetches_nothing_and_shows_the_picture(page):
    assert not {"script", "link", "iframe"} & set(re.findall(r"<(\w+)", page))
    assert not re.search(r"@import|url\(|href=", page)
    (link,) = re.findall(r'src="([^"]*)"', page)
    kind, _, data = link.partition(",")
    assert kind == "data:image/png;base64"
    assert matplotlib.image.imread(io.BytesIO(base64.b64decode(data))).shape[1] > 500
