"""What `make docs` has written (`make test-docs`). The lesson pages as notebooks are complete, without errors and
readable in Jupyter; the website is usable on a phone and with a screen reader."""

import re
import shutil
import sys

import browser
import nbclient
import nbformat
import pytest
from runs import ROOT, finished

from gluon_mgpu.support import subprocesses

FOLDER = ROOT / "build/docs/notebooks"
WITH_CELLS = [path.stem for path in ROOT.glob("docs/*.md") if "file_format: mystnb" in path.read_text()]
TRAIN = """print(np.__version__)
history = train_lesson(gpus=2, dataset="synthetic", limit=600, epochs=1, seed=1)
"""
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
    install, *cells = code_cells(notebook(name))
    ran = [cell for cell in cells if "skip-execution" not in cell.metadata.get("tags", ())]  # by QUICK=1
    assert [cell.execution_count for cell in ran] == [*range(1, len(ran) + 1)] and not install.outputs
    outputs = [output for cell in ran for output in cell.outputs]
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
def test_the_first_cell_says_how_to_install_the_package_and_the_second_sets_up(name, tmp_path):
    install, set_up = (cell.source for cell in code_cells(notebook(name))[:2])
    if "import mxnet" in set_up:
        assert set_up.index("gluon_mgpu.configure(") < set_up.index("import mxnet")
    program = f"import sys; sys.modules['gluon_mgpu'] = None\n{install}"  # as if it were not installed
    run = finished(sys.executable, "-c", program, cwd=tmp_path)
    error = run.stderr.splitlines()[-1]
    assert error.startswith("ImportError: gluon_mgpu is not installed: ") and "`make install`" in error


def test_a_hosted_notebook_with_a_new_numpy_installs_what_is_missing_and_trains(tmp_path):
    """As in Colab: another environment, which has NumPy 2 and pandas, with the notebook and the wheel in a folder."""
    python = tmp_path / "venv/bin/python"
    for command in (
        [sys.executable, "-m", "venv", tmp_path / "venv"],
        [python, "-m", "pip", "install", "--quiet", "numpy>=2", "pandas", "matplotlib", "ipykernel"],
        [python, "-m", "ipykernel", "install", "--prefix", tmp_path / "venv", "--name", "hosted"],
    ):
        assert finished(*command, timeout=600).returncode == 0
    folder = tmp_path / "content"
    folder.mkdir()
    shutil.copy(next(FOLDER.glob("gluon_mgpu-*.whl")), folder)
    hosted = notebook("from-scratch")
    hosted.cells = code_cells(hosted)[:2] + [nbformat.v4.new_code_cell(TRAIN)]
    env = {**subprocesses.users_environment(), "JUPYTER_PATH": str(tmp_path / "venv/share/jupyter")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", env["JUPYTER_PATH"])
        client = nbclient.NotebookClient(
            hosted, timeout=600, kernel_name="hosted", resources={"metadata": {"path": folder}}
        )
        client.execute(env=env)
    printed = "".join(output.text for output in hosted.cells[2].outputs if output.get("name") == "stdout")
    numpy, first, epoch = printed.replace("\r", "").strip().splitlines()
    assert int(numpy.split(".")[0]) >= 2 and first == "running on: [cpu(0), cpu(1)]" and epoch.startswith("epoch 1, ")


def test_every_picture_has_an_alternative_text():
    for page in PAGES:
        for picture in re.findall(r"<img [^>]*>", page.read_text()):
            alt, src = (re.search(rf'{name}="([^"]+)"', picture)[1] for name in ("alt", "src"))
            assert alt not in src, f"{page.name}: {picture}"  # the default is the file's name


def test_no_page_is_wider_than_a_phone(chromium):
    overflow = {page.name: browser.Page(chromium, page, 390).overflow() for page in PAGES}
    assert overflow and not any(overflow.values()), overflow


def test_the_next_button_stays_in_view_on_a_phone(chromium):
    page = browser.Page(chromium, ROOT / "build/docs/from-scratch.html", 390)
    page.value("document.querySelector('#step-through').scrollIntoView({behavior: 'instant'})")
    for _ in range(page.value("stepThrough.run(4, 10, 'star').steps.length")):
        box = page.value("document.getElementById('step-next').getBoundingClientRect().toJSON()")
        assert 0 <= box["top"] and box["bottom"] <= 844
        page.click("#step-next")
