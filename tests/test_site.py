"""The website, as `make docs` has written it, is usable on a phone and with a screen reader."""

import re
from pathlib import Path

import browser
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "build/docs").glob("*.html"))

pytestmark = pytest.mark.notebooks


def test_every_picture_has_an_alternative_text():
    for page in PAGES:
        for picture in re.findall(r"<img [^>]*>", page.read_text()):
            alt, src = (re.search(rf'{name}="([^"]+)"', picture)[1] for name in ("alt", "src"))
            assert alt not in src, f"{page.name}: {picture}"  # the default is the file's name


def test_no_page_is_wider_than_a_phone(chromium):
    overflow = {page.name: browser.Page(chromium, page, 390, False).overflow() for page in PAGES}
    assert overflow and not any(overflow.values()), overflow


def test_the_next_button_stays_in_view_on_a_phone(chromium):
    [path] = [page for page in PAGES if 'id="step-next"' in page.read_text()]
    page = browser.Page(chromium, path, 390, False)
    page.value("document.querySelector('#step-through').scrollIntoView({behavior: 'instant'})")
    for _ in range(page.value("stepThrough.run(4, 10, 'star').steps.length")):
        box = page.value("document.getElementById('step-next').getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] and box["bottom"] <= 844
        page.click("#step-next")
