"""The lesson pages as notebooks, as `make docs` has written them: complete, without errors, readable in Jupyter."""

import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from own_process import finished

from gluon_mgpu.runtime import engine

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/docs/notebooks"
WITH_CELLS = [path.stem for path in ROOT.glob("docs/*.md") if "file_format: mystnb" in path.read_text()]
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
