"""The page of a parity: what is on it, and that a browser needs nothing else for it."""

import copy
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from gluon_mgpu.parity import page

RECIPES = ("scratch-2gpu", "gluon-4gpu")
BANDS = {  # two recipes whose numbers are all different; the second has a recorded accuracy outside its band
    "scratch-2gpu": {
        "source": 'A notebook, "quoted"',
        "notebook": [0.1, 0.61, 0.75],
        "decimals": 2,
        "runs": {"1": [0.1003, 0.6332, 0.7151], "2": [0.1426, 0.6221, 0.7917]},
        "earlier": {"1001": [0.1236, 0.6606, 0.7545], "1002": [0.1001, 0.5638, 0.6646]},
        "low": [0.0, 0.3345, 0.4746],
        "high": [0.2381, 0.8863, 0.9992],
        "holds": [True, True, True],
    },
    "gluon-4gpu": {
        "source": "Another notebook",
        "notebook": [0.9488, 0.9763],
        "decimals": 4,
        "runs": {"1": [0.9611, 0.9669], "2": [0.9466, 0.9706]},
        "earlier": {"1001": [0.9495, 0.9654]},
        "low": [0.9213, 0.9417],
        "high": [0.9764, 0.9733],
        "holds": [True, False],
    },
}
FINDINGS = [
    ("examples", "the sum is 3", True, "it is 3"),
    ("accuracy", "gluon-4gpu, epoch 2", False, "0.9763 is outside the band"),
    ("examples", "the shards are halves", True, "they are"),
    ("claims", "it is faster", None, "a CPU cannot show it"),
]
RESULT = {
    "verdict": "parity FAILS: gluon-4gpu, epoch 2",
    "holds": False,
    "made_by": {"python": "3.11.7", "seeds": [7, 8], "quick": False},
    "findings": [dict(zip(("check", "claim", "holds", "figure"), finding)) for finding in FINDINGS],
    "accuracy": BANDS,
    "drift": {
        "steps": 4,
        "rounding": [[1e-9, 2e-9, 4e-9, 8e-9], [1e-9, 3e-9, 5e-9, 9e-9]],
        "apart": {"scratch and highlevel": [0.0] * 4, "scratch and the notebook's code": [0.0, 1e-9, 2e-9, 3e-9]},
        "limit": 1.8e-7,
        "step_rounding": [4e-7, 5e-7, 3e-7, 6e-7],
        "step_apart": {"scratch and the notebook's code": [5e-7, 4e-7, 3e-7, 4e-7]},
        "step_limit": 6e-6,
    },
}


class Seen(HTMLParser):
    """What a browser makes of a page: its tables, its words, and what its elements refer to."""

    WORDS = ("h1", "h2", "h3", "p", "li", "dt", "dd")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.tables, self.words = [], [], [], []
        self.within = None  # the element whose text is read
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self.within = tag
        elif tag in self.WORDS:
            self.words.append((self.tags.count("svg"), ""))
            self.within = tag

    def handle_endtag(self, tag):
        if tag == self.within:
            self.within = None

    def handle_data(self, data):
        if self.within in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.within:
            pictures, text = self.words[-1]
            self.words[-1] = (pictures, text + data)

    def said(self, after_pictures=None):
        """What headings, paragraphs and lists say, in order; or those of them that come after so many pictures."""
        return [" ".join(text.split()) for n, text in self.words if after_pictures in (None, n)]


@pytest.fixture(scope="module")
def text():
    return page.render(RESULT)


@pytest.fixture(scope="module")
def seen(text):
    return Seen(text)


def changed(**parts):
    return {**copy.deepcopy(RESULT), **parts}


def pictures(text):
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def words(picture):
    return [" ".join("".join(e.itertext()).split()) for e in picture.iter("{http://www.w3.org/2000/svg}text")]


def test_every_number_of_every_recipe_is_in_its_table(seen):
    first, second = seen.tables[:2]
    assert first[0][:5] == second[0][:5] == ["epoch", "notebook", "seed 1", "seed 2", "band"]
    assert [row[:5] for row in first[1:]] == [
        ["1", "0.10", "0.1003", "0.1426", "0.0000–0.2381"],
        ["2", "0.61", "0.6332", "0.6221", "0.3345–0.8863"],
        ["3", "0.75", "0.7151", "0.7917", "0.4746–0.9992"],
    ]
    assert [row[:5] for row in second[1:]] == [
        ["1", "0.9488", "0.9611", "0.9466", "0.9213–0.9764"],
        ["2", "0.9763", "0.9669", "0.9706", "0.9417–0.9733"],
    ]
    assert [row[5].split()[-1] for row in first[1:] + second[1:]] == ["holds"] * 4 + ["FAILS"]


def test_every_finding_is_in_the_table_of_its_check_in_the_order_they_came(seen):
    tables = [[(row[1], row[0].split(" ", 1)[1], row[2]) for row in table[1:]] for table in seen.tables[2:]]
    assert tables == [
        [("the sum is 3", "holds", "it is 3"), ("the shards are halves", "holds", "they are")],
        [("gluon-4gpu, epoch 2", "FAILS", "0.9763 is outside the band")],
        [("it is faster", "not shown here", "a CPU cannot show it")],
    ]
    after = seen.said(after_pictures=4)
    assert after[after.index("All findings") + 1 : after.index("Made by")] == ["examples", "accuracy", "claims"]


def test_the_verdict_the_counts_and_what_fails_are_above_the_first_picture(seen):
    assert seen.said(after_pictures=0)[1:4] == [
        "✗ parity FAILS: gluon-4gpu, epoch 2",
        "Of 4 findings: 2 hold, 1 fails, 1 not shown here.",
        "accuracy: gluon-4gpu, epoch 2: 0.9763 is outside the band",
    ]


def test_several_findings_that_fail_are_listed_once_each():
    failed = [{**finding, "holds": False} for finding in RESULT["findings"]]
    seen = Seen(page.render(changed(findings=failed)))
    assert seen.said(after_pictures=0)[2] == "Of 4 findings: 0 hold, 4 fail, 0 not shown here."
    assert seen.tags.count("li") == 4


def test_a_verdict_that_holds_is_told_apart_by_its_sign_and_lists_nothing():
    held = [{**finding, "holds": True} for finding in RESULT["findings"]]
    seen = Seen(page.render(changed(verdict="parity holds", holds=True, findings=held)))
    assert seen.said()[1] == "✓ parity holds"
    assert "li" not in seen.tags


def test_the_source_of_each_recipe_and_what_made_the_result_are_said(seen):
    said = seen.said()
    for source in ('Recorded in A notebook, "quoted"', "Recorded in Another notebook"):
        assert source in said
    made_by = said[said.index("Made by") + 1 :]
    assert made_by == ["python", "3.11.7", "seeds", "7, 8", "quick", "no"]


def test_each_picture_is_a_well_formed_svg_that_says_what_it_shows(text):
    labels = [picture.get("aria-label") for picture in pictures(text)]
    assert labels[:2] == [f"Test accuracy by epoch of {name}" for name in RECIPES]
    assert len(labels) == len(set(labels)) == 4


def test_a_picture_shows_a_recorded_accuracy_outside_the_band_only_where_there_is_one(text):
    within, outside, *_ = map(words, pictures(text))
    assert {"the band", "seed 1", "seed 2", "the notebook"} <= set(within) & set(outside)
    assert ("outside the band" in within, "outside the band" in outside) == (False, True)


def test_a_curve_that_a_log_axis_cannot_show_is_said_to_be_zero(text):
    *_, running_on, by_step = map(words, pictures(text))
    assert "scratch and highlevel: 0 at every step" in running_on
    assert "scratch and the notebook's code: 0 at 1 of 4 steps" in running_on
    assert "scratch and the notebook's code" in by_step
    assert ("the limit, 1.8e-07" in running_on, "the limit, 6.0e-06" in by_step) == (True, True)


def test_what_looks_like_html_is_text():
    hostile = "<script>alert('&amp;')</script>"
    result = changed(
        verdict=hostile,
        findings=[{"check": hostile, "claim": hostile, "holds": False, "figure": hostile}],
        accuracy={hostile: {**BANDS["gluon-4gpu"], "source": hostile}},
        made_by={hostile: hostile},
    )
    text = page.render(result)
    seen = Seen(text)
    assert "script" not in seen.tags
    assert seen.tables[1][1][1:] == [hostile, hostile]
    assert len(pictures(text)) == 3
    assert seen.said().count(hostile) == 4  # the recipe, the check, and both sides of made_by
    assert f"✗ {hostile}" in seen.said()


def test_a_browser_fetches_nothing(seen):
    links = [value for name, value in seen.attributes if name in ("src", "href", "xlink:href", "srcset", "data")]
    assert links and all(link.startswith("#") for link in links)
    assert not {"script", "link", "img", "iframe", "image"} & set(seen.tags)


def test_the_styles_fetch_nothing_either(text):
    assert "@import" not in text
    assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)", text))


def test_no_two_elements_share_an_id_and_every_reference_has_its_own(text, seen):
    ids = [value for name, value in seen.attributes if name == "id"]
    assert ids and len(ids) == len(set(ids))
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        used = set(re.findall(r'(?:url\(|href=")#([^")]+)', svg))
        assert used and used <= set(re.findall(r'\bid="([^"]+)"', svg))


def test_a_quick_run_of_one_recipe_and_one_seed_has_a_page():
    facts = {**BANDS["gluon-4gpu"], "runs": {"1": [0.9611, 0.9669]}}
    text = page.render(changed(accuracy={"gluon-4gpu": facts}))
    assert Seen(text).tables[0][2][:4] == ["2", "0.9763", "0.9669", "0.9417–0.9733"]
    assert len(pictures(text)) == 3


def test_distances_that_are_no_numbers_have_a_page():
    apart = {"scratch and highlevel": [1e-9, float("inf"), float("nan"), float("nan")]}
    text = page.render(changed(drift={**RESULT["drift"], "apart": apart}))
    assert "scratch and highlevel" in words(pictures(text)[2])


def test_the_same_result_gives_the_same_bytes(text):
    code = f"from gluon_mgpu.parity import page; import sys; sys.stdout.buffer.write(page.render({RESULT!r}).encode())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    assert done.stdout == text.encode()


def test_the_page_is_made_without_mxnet():
    code = "import sys; from gluon_mgpu.parity import page; print(callable(page.render), 'mxnet' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"]
