"""A Sphinx extension: writes each page with code cells as an executed notebook too, in notebooks/, and links to it.

myst_nb has executed the cells. The notebooks must also read well in Jupyter and VS Code, and on their own.
"""

import base64
import mimetypes
import re
from pathlib import Path

import nbformat

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
INSTALL = """\
# Installs what is missing, for example in Colab. Otherwise, it does nothing.
import subprocess
import sys
from glob import glob
from importlib.util import find_spec


def install(*packages):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)


if not find_spec("gluon_mgpu"):
    wheels = glob("gluon_mgpu-*.whl")
    if not wheels:
        raise ImportError(
            "gluon_mgpu is not installed: upload its wheel to this notebook's folder (`make docs` writes it to "
            "build/docs/notebooks), or run `make install` in a checkout, and select the kernel .venv/bin/python"
        )
    install(wheels[0])
    import setuptools  # provides distutils, which MXNet imports
if not find_spec("mxnet"):
    install("--no-deps", "mxnet==1.9.1")
"""
MARKDOWN = re.compile(
    r"(?P<code>^```.*?^```|`[^`]+`)|(?P<bracket>\s\()?(?P<image>!?)\[(?P<words>[^]]*)\]\((?P<target>[^()\s]+)\)(?(bracket)\))",
    re.MULTILINE | re.DOTALL,
)


def is_notebook(app, page):
    return "kernelspec" in app.env.metadata.get(page, {})


def add_link(app, page, template, context, doctree):
    if is_notebook(app, page):
        link = f'<p><a href="notebooks/{page}.ipynb" download>Download this page as a notebook</a></p>'
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{link}", 1)


def write(app, exception):
    if exception or app.builder.name != "html":
        return
    folder = Path(app.outdir, "notebooks")
    folder.mkdir(exist_ok=True)
    pages = [page for page in app.env.found_docs if is_notebook(app, page)]
    for page in pages:
        notebook = nbformat.read(Path(app.env.mystnb_config.output_folder, f"{page}.ipynb"), as_version=4)
        notebook.metadata = nbformat.from_dict(METADATA)
        notebook.cells.insert(1, nbformat.v4.new_code_cell(INSTALL))  # after the page's title
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                make_standalone(cell, Path(app.srcdir), pages)
        nbformat.write(notebook, folder / f"{page}.ipynb")


def make_standalone(cell, docs, pages):
    """Include a cell's pictures. Keep links to the web and to other notebooks; replace all others by their words. Name
    the files of interactive pages, because Jupyter does not run scripts in Markdown."""

    def replace(match):
        if match["code"] or "://" in match["target"]:
            return match[0]
        target, words = Path(match["target"].split("#")[0]), match["words"]
        if match["image"]:
            content = base64.b64encode((docs / target).read_bytes()).decode()
            # not an attachment, because JupyterLab shows none that is an SVG
            new = f'<img alt="{words}" src="data:{mimetypes.guess_type(target)[0]};base64,{content}">'
        elif target.suffix == ".md" and target.stem in pages:
            new = f"[{words}]({target.stem}.ipynb)"
        else:
            new = "" if match["bracket"] else words  # "(why)" says nothing without its link
        return f"{match['bracket']}{new})" if match["bracket"] and new else new

    page = r"^```\{interactive\} (.*)[^`]*```$"
    source = re.sub(page, r"(In a checkout, open docs/\1 in a browser.)", cell.source, flags=re.MULTILINE)
    cell.source = re.sub(r"^</?div.*>\n*", "", MARKDOWN.sub(replace, source), flags=re.MULTILINE)


def setup(app):
    app.connect("html-page-context", add_link, priority=900)  # after conf.py
    app.connect("build-finished", write)
