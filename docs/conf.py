"""The website: `make docs` runs every code cell on CPU contexts, and fails if a cell fails."""

import inspect
import os
import re
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
from docutils import nodes
from jupyter_cache.executors import utils
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import gluon_mgpu
from gluon_mgpu import exercises
from gluon_mgpu.commands.main import main as cli

gluon_mgpu.configure()  # before autodoc imports the modules, which import mxnet

project = "gluon_mgpu"
version = release = gluon_mgpu.__version__
copyright = "the gluon_mgpu authors, Apache-2.0"
sys.path.insert(0, str(Path(__file__).parent))  # for the extension notebooks
extensions = ["myst_nb", "notebooks", "sphinx_copybutton"]
extensions += ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode"]
copybutton_selector = ":not(.output) > div.highlight > pre"
exclude_patterns = []
templates_path = ["_templates"]
nitpicky = True
nitpick_ignore_regex = [("py:(obj|class)", ".*")]  # `names` in docstrings, and types, become links if possible

# Pages are plain Markdown, so anchors of headings and relative links also work on a code host.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]  # which commands() writes

# Every page has its own kernel, because MXNet's engine must be configured before mxnet is imported.
nb_execution_mode = "force"  # a cache would not notice changes of the package
nb_execution_timeout = 600  # seconds per cell, on a busy machine
nb_execution_raise_on_error = True
nb_execution_in_temp = True
utils.executenb = partial(utils.executenb, coalesce_streams=True)  # a stream that is read in parts is one output
os.environ["TQDM_DISABLE"] = "1"  # no progress bars in the outputs
site = Path(__file__).resolve().parents[1] / "tests/site"  # MXNet's import takes less time
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
ipython = tempfile.TemporaryDirectory()  # keeps the user's IPython settings out of the pages
os.environ["IPYTHONDIR"] = ipython.name
(Path(ipython.name) / "profile_default").mkdir()
(Path(ipython.name) / "profile_default/ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 40")
QUICK = "GLUON_MGPU_DOCS_QUICK" in os.environ  # few training examples; cells with the tag "long" are not run

autodoc_member_order = "bysource"
python_maximum_signature_line_length = 150  # longer ones have one line per argument
autodoc_inherit_docstrings = False  # MXNet's docstrings are not part of this documentation
default_role = "py:obj"
autodoc_preserve_defaults = True
smartquotes = False  # options begin with two dashes

html_theme = "furo"
html_title = "gluon_mgpu"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "native"


class LinksOutOfDocs(SphinxTransform):
    """Links to a module's file become links to its API page."""

    default_priority = 500

    def apply(self):
        links = self.document.findall(
            lambda node: isinstance(node, (addnodes.download_reference, addnodes.pending_xref))
        )
        for node in list(links):
            module = re.fullmatch(r"(?:\.\./)*(gluon_mgpu/.*)\.py", node["reftarget"])
            if module:
                name = module[1].replace("/", ".")
                new = addnodes.pending_xref(refdomain="py", reftype="mod", reftarget=name, refdoc=node["refdoc"])
                new += nodes.inline("", node.astext())
                node.replace_self(new)


class Interactive(SphinxDirective):
    """Include an interactive page, which is also an HTML document of its own. first: what step.html shows at first."""

    required_arguments = 1
    option_spec = {"first": str}

    def run(self):
        path = Path(self.env.srcdir, self.arguments[0])
        self.env.note_dependency(str(path))
        _, content = path.read_text().split("<!-- The website includes what follows. -->\n")
        if first := self.options.get("first"):
            content = f"<script>window.stepThroughFirst = {first}</script>{content}"
        return [nodes.raw("", content, format="html")]


class Recorded(click.HelpFormatter):
    """Collects the sections of a command's help, {heading: [(names, help)]}, instead of lines of text."""

    def __init__(self):
        super().__init__()
        self.sections, self.heading = {}, None

    @contextmanager
    def section(self, name):
        self.heading = name
        yield

    def write_dl(self, rows, *args, **kwargs):
        self.sections[self.heading] = list(rows)


def plain(text):
    """Escape what Markdown would interpret."""
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def commands(command, path=("gluon-mgpu",)):
    """Yield the help of a command and its subcommands, as Markdown."""
    context = click.Context(command, info_name=" ".join(path), **command.context_settings)
    yield f"\n{'#' * min(len(path) + 2, 4)} {' '.join(path)}\n\n{plain(inspect.cleandoc(command.help))}\n"
    yield f"\n```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    help = Recorded()
    command.format_options(context, help)
    for heading, rows in help.sections.items():
        if heading != "Commands":  # they follow below
            yield f"\n**{heading}**\n\n" + "".join(f"`{names.strip()}`\n: {plain(text)}\n\n" for names, text in rows)
    lines = "\n".join(command.examples)
    yield f"\n**Examples**\n\n```text\n{lines}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from commands(command.get_command(context, name), (*path, name))


def before_parsing(app, docname, source):
    if docname == "training":
        source[0] += "".join(commands(cli))
    if docname == "exercises":
        course = re.search(r":numbered: 1\n\n(.*?)```", Path(app.srcdir, "index.md").read_text(), re.DOTALL)[1].split()
        rows = [
            f"| `{n}` | {exercises.title(n)} | [{course.index(p) + 1}](./{p}.md) |" for n, p in exercises.PAGES.items()
        ]
        source[0] += "\n".join(["\n## All exercises\n", "| exercise | task | page |", "|---|---|---|", *rows])
    if QUICK:
        cells = r":tags: \[long\]\n(.*?^```\n)"
        note = "\n*This site was built with `QUICK=1`, so this cell did not run.*\n"
        source[0] = re.sub(cells, rf":tags: [skip-execution]\n\1{note}", source[0], flags=re.MULTILINE | re.DOTALL)
        source[0] = re.sub(r"^limit = None", "limit = 2000", source[0], flags=re.MULTILINE)


def readable(app, pagename, templatename, context, doctree):
    """Let long inline code wrap after punctuation, but not within names or options; link pictures to their files."""

    def marked(word):
        if word[1].startswith("-"):
            return f'<span class="pre option">{word[1]}</span>'
        if len(word[1]) < 16:
            return f'<span class="pre">{word[1]}</span>'
        marks = re.sub(r"((?:[_(=,/|]|\.(?![.\d])|[0-9a-f]{16})(?=.))", r"\1<wbr>", word[1])
        return f'<span class="pre">{marks}</span>'

    body = re.sub(r'<span class="pre">([^<]*)</span>', marked, context.get("body", ""))
    picture = r'<img [^>]*src="([^"]*_images/[a-z]+\.png)"[^>]*/>'
    context["body"] = re.sub(picture, r'<a class="picture" href="\1">\g<0></a>', body)


def plain_docstring(app, what, name, obj, options, lines):
    """Escape stars and bars: docstrings are plain text."""
    lines[:] = [re.sub(r"([*|])", r"\\\1", line) for line in lines]


def skip_fields(app, what, name, obj, skip, options):
    """Skip the fields of named tuples, which are in the signature."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app):
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("autodoc-skip-member", skip_fields)
    app.add_transform(LinksOutOfDocs)
    app.add_directive("interactive", Interactive)
    app.connect("source-read", before_parsing)
    app.connect("html-page-context", readable)
