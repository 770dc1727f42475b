"""What `make docs` has written. The lesson pages as notebooks are complete, without errors and readable in Jupyter; the
website is usable on a phone and with a screen reader."""

import re
import sys

import browser
import nbclient
import nbformat
import pytest
from runs import ROOT, finished

from gluon_mgpu.runtime import engine

FOLDER = ROOT / "build/docs/notebooks"
WITH_CELLS = [path.stem for path in ROOT.glob("docs/*.md") if "file_format: mystnb" in path.read_text()]
PAGES = sorted((ROOT / "build/docs").glob("*.html"))
FENCES = r"^```.*?^```"

pytestmark = pytest.mark.notebooks
each_lesson = pytest.mark.parametrize("name", WITH_CELLS)


def notebook(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_lesson
def test_every_cell_of_a_lesson_has_run_without_an_error(name):
    nbformat.validate(notebook(name))
    cells = code_cells(notebook(name))
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs and "error" not in {output.output_type for output in outputs}


@each_lesson
def test_the_markdown_of_a_notebook_needs_neither_sphinx_nor_other_files(name):
    for cell in notebook(name).cells:
        if cell.cell_type == "markdown":
            text = re.sub(FENCES, "", cell.source, flags=re.MULTILINE | re.DOTALL)
            assert not re.findall(r"^(?:```|:::)\{.*|^\(.*\)=$|\{[a-z:-]+\}`.*", cell.source, re.MULTILINE)
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", text)):
                assert target.startswith("https://") or (FOLDER / target).is_file(), target
            assert set(re.findall(r'<img alt="[^"]+" src="(.{5})|<img', text)) <= {"data:"}


@each_lesson
def test_the_first_cell_sets_up_or_says_how_to_install_the_package(name):
    source = code_cells(notebook(name))[0].source
    assert source.index("gluon_mgpu.configure(") < source.index("import mxnet")
    program = f"import sys; sys.modules['gluon_mgpu'] = None\n{source}"  # as if it were not installed
    run = finished(sys.executable, "-c", program)
    assert run.stderr.splitlines()[-1].startswith("ImportError: gluon_mgpu is not installed: run `make install`")


def test_a_downloaded_notebook_runs_in_an_empty_folder(tmp_path):
    downloaded = notebook("from-scratch")
    for cell in downloaded.cells:
        cell.source = cell.source.replace("lr=0.2, seed=1)", "lr=0.2, epochs=1, seed=1)")
    client = nbclient.NotebookClient(downloaded, timeout=300, resources={"metadata": {"path": tmp_path}})
    client.execute(env=engine.users_environment())
    printed = "".join(output.get("text", "") for cell in code_cells(downloaded) for output in cell.outputs)
    assert "epoch 1, time: " in printed and not list(tmp_path.iterdir())


def test_every_picture_has_an_alternative_text():
    for page in PAGES:
        for picture in re.findall(r"<img [^>]*>", page.read_text()):
            alt, src = (re.search(rf'{name}="([^"]+)"', picture)[1] for name in ("alt", "src"))
            assert alt not in src, f"{page.name}: {picture}"  # the default is the file's name


def test_no_page_is_wider_than_a_phone(chromium):
    overflow = {page.name: browser.Page(chromium, page, 390, False).overflow() for page in PAGES}
    assert overflow and not any(overflow.values()), overflow


def test_the_next_button_stays_in_view_on_a_phone(chromium):
    page = browser.Page(chromium, ROOT / "build/docs/from-scratch.html", 390, False)
    page.value("document.querySelector('#step-through').scrollIntoView({behavior: 'instant'})")
    for _ in range(page.value("stepThrough.run(4, 10, 'star').steps.length")):
        box = page.value("document.getElementById('step-next').getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] and box["bottom"] <= 844
        page.click("#step-next")
