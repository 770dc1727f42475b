"""A benchmark's number stands on one page; other pages link to it."""

import re
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}
WITH_UNIT = r"(?<![\w.,/-])\d+\.\d+(?=\s*(?:ms|s|seconds|times|GB|MB|GFLOP/s)\b)"


def measured(text):
    """The times, sizes and speeds on a page that have three digits: with a unit, or in a table of milliseconds."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = {*re.findall(WITH_UNIT, prose)}
    for table in re.findall(r"((?:^\|.*\n)+)", prose, re.MULTILINE):
        heading, *rows = table.splitlines()
        if re.search(r"\bms\b", heading):
            found |= {*re.findall(r"(?<![\w.-])\d+\.\d+(?![\w.])", " ".join(rows))}
    return {number for number in found if len(number) >= 4}


def test_a_measured_number_stands_on_one_page_only():
    numbers = {page: measured(text) for page, text in PAGES.items()}
    assert len(numbers["performance.md"]) > 20
    shared = {(a, b): numbers[a] & numbers[b] for a, b in combinations(numbers, 2)}
    assert not {pages: both for pages, both in shared.items() if both}


def test_a_number_that_is_copied_to_another_page_is_found():
    row = "| | ms per step |\n|---|---|\n| scratch | 28.8 (27.1-29.0) |\n"
    assert measured(row) & measured("A step takes 28.8 ms.") == {"28.8"}
    assert measured("```\n28.8 ms\n```\n version 0.28.1, 2 contexts") == set()
