"""The site: `make docs` runs every code cell of these pages on CPU contexts, and fails where one fails."""

import inspect
import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

import click
from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

import gluon_mgpu
from gluon_mgpu.commands.common import main as cli

gluon_mgpu.configure()  # before autodoc imports the modules, and so mxnet

project = "gluon_mgpu"
version = release = gluon_mgpu.__version__
copyright = "the gluon_mgpu authors, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode"]
exclude_patterns = []
templates_path = ["_templates"]
nitpicky = True
nitpick_ignore_regex = [("py:(obj|class)", ".*")]  # `names` in docstrings, and types: a link where there is one

# Pages are plain Markdown: a reader on a code host has headings' anchors and relative links too.
myst_heading_anchors = 3
myst_enable_extensions = ["deflist"]  # what commands() writes

# Every page has a kernel of its own, which settles MXNet's engine before it imports mxnet, as any program must.
nb_execution_mode = "force"  # outputs follow the package, which a cache would not see
nb_execution_timeout = 600  # seconds a cell: on a machine that others use too
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm's bars need no widgets here
ipython = tempfile.TemporaryDirectory()  # the user's own settings of IPython stay out of the pages
os.environ["IPYTHONDIR"] = ipython.name
(Path(ipython.name) / "profile_default").mkdir()
(Path(ipython.name) / "profile_default/ipython_kernel_config.py").write_text("get_config().IPKernelApp.log_level = 40")
QUICK = "GLUON_MGPU_DOCS_QUICK" in os.environ  # cells with the tag "long" are shown and not run

autodoc_member_order = "bysource"
python_maximum_signature_line_length = 150  # with the modules that are not shown; a longer one has a line an argument
autodoc_inherit_docstrings = False  # MXNet's own are not ours
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
    """A link to a module's file becomes one to its page of the API, and one to the README one to the index."""

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
            elif node.get("refdomain") == "doc" and Path(node["reftarget"]).name == "README":
                node["reftarget"] = "index"


class Recorded(click.HelpFormatter):
    """The sections of a command's help, {heading: [(names, help)]}, in place of lines of text."""

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
    """Text that Markdown leaves as it is."""
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def commands(command, path=("gluon-mgpu",)):
    """The help of a command, and of the commands under it, as Markdown."""
    context = click.Context(command, info_name=" ".join(path))
    yield f"\n{'#' * min(len(path) + 1, 3)} {' '.join(path)}\n\n{plain(inspect.cleandoc(command.help))}\n"
    yield f"\n```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    help = Recorded()
    command.format_options(context, help)
    for heading, rows in help.sections.items():
        if heading != "Commands":  # they come below
            yield f"\n**{heading}**\n\n" + "".join(f"`{names.strip()}`\n: {plain(text)}\n\n" for names, text in rows)
    lines = "\n".join(command.examples)
    yield f"\n**Examples**\n\n```text\n{lines}\n```\n"
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))


def before_parsing(app, docname, source):
    if docname == "cli":
        source[0] += "".join(commands(cli.main))
    if QUICK:
        source[0] = re.sub(r"```\{code-cell\}[^\n]*\n:tags: \[long\]\n", "```python\n", source[0])


def readable(app, pagename, templatename, context, doctree):
    """Inline code may be broken after a mark, not within a name nor after an option's dashes; pictures open alone."""

    def marked(word):
        if word[1].startswith("-"):
            return f'<span class="pre option">{word[1]}</span>'
        marks = re.sub(r"((?:[_(=,/|]|\.(?![.\d])|[0-9a-f]{16})(?=.))", r"\1<wbr>", word[1])
        return f'<span class="pre">{marks}</span>'

    body = re.sub(r'<span class="pre">([^<]*)</span>', marked, context.get("body", ""))
    picture = r'<img [^>]*src="([^"]*_images/[a-z]+\.png)"[^>]*/>'
    context["body"] = re.sub(picture, r'<a class="picture" href="\1">\g<0></a>', body)


def plain_docstring(app, what, name, obj, options, lines):
    """Docstrings are plain text: stars and bars stand for themselves."""
    lines[:] = [re.sub(r"([*|])", r"\\\1", line) for line in lines]


def skip_fields(app, what, name, obj, skip, options):
    """The fields of named tuples stand in their signature."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app):
    app.connect("autodoc-process-docstring", plain_docstring)
    app.connect("autodoc-skip-member", skip_fields)
    app.add_transform(LinksOutOfDocs)
    app.connect("source-read", before_parsing)
    app.connect("html-page-context", readable)
