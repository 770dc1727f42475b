"""Parity's report: the same numbers as text and as a page that a browser can show without anything else."""

import base64
import io
import re
from html.parser import HTMLParser

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


class Seen(HTMLParser):
    """The tags, links and texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def page():
    return report.page(RESULT)


def test_text_and_page_have_every_number_and_every_finding(page):
    texts, lines = Seen(page).texts, report.text(RESULT)
    for cell in ("0.11", "0.1003", "0.7151", "0.3345", "0.8863", "FAILS", "it is 3", "[7, 8]", "gluon-4gpu", HOSTILE):
        assert any(cell in text for text in texts) and cell in lines, cell
    assert lines.splitlines()[0] == RESULT["verdict"]


def test_what_looks_like_html_is_shown_as_text(page):
    assert "script" not in Seen(page).tags


def test_a_browser_fetches_nothing_and_shows_both_pictures(page):
    seen = Seen(page)
    assert len(seen.links) == 2 and not {"script", "link", "iframe"} & set(seen.tags)
    for link in seen.links:
        kind, _, data = link.partition(",")
        assert kind == "data:image/png;base64"
        assert matplotlib.image.imread(io.BytesIO(base64.b64decode(data))).shape[1] > 500
    assert not re.search(r"@import|url\(", page)


def test_columns_of_the_text_are_aligned():
    rows = [line for line in report.text(RESULT).splitlines() if "seed" in line and "." in line]
    assert len({row.index("0.1") for row in rows}) == 1
