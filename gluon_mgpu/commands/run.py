"""`gluon-mgpu run`: run a program or notebook that was written for MXNet 1.x, in an environment of its time."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.compat import startup
from gluon_mgpu.old import contexts, environment, packages, prepare
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import UsageError, command, setting
from gluon_mgpu.support.params import FILE

LONGEST = 1000  # characters of a program and its arguments that an error repeats

OPTIONS = (
    common.option(
        "--gpus",
        type=click.IntRange(min=1),
        help="If there is no GPU, let the program use N CPU contexts as N GPUs. Without this option, "
        "mx.context.num_gpus() returns 0, but the program can use mx.gpu(i) for any i.",
    ),
    common.settings(
        "data_dir",
        data_dir={"help": "Folder that contains MNIST or Fashion-MNIST. Default: as for train.", "heading": "Options"},
    ),
    common.option(
        "--with", "extra", multiple=True, metavar="PACKAGE", help="Add a package, such as gluoncv==0.10.5. Repeatable."
    ),
    common.option("--requirements", type=FILE, metavar="FILE", help="Add the packages in FILE, as pip -r."),
    common.option(
        "--python",
        type=click.Choice([*packages.PINS]),
        help="Python version of the environment. Default: the oldest that is installed.",
    ),
    common.option("--cpu", is_flag=True, help="Use MXNet without CUDA, even if mxnet-cu112 is installed."),
    common.option(
        "--here",
        is_flag=True,
        help="Use the current environment and its packages, for a program that runs with a current NumPy.",
    ),
)


def preparation(command: Any) -> Any:
    """Add the options that `python_and_settings` takes."""
    for add in reversed(OPTIONS):
        command = add(command)
    return command


def python_and_settings(
    gpus: int | None,
    data_dir: str | None,
    here: bool,
    python: str | None,
    cpu: bool,
    extra: tuple[str, ...],
    requirements: str | None,
) -> tuple[str, prepare.Preparation]:
    """(the Python that runs the program, its settings). Makes the environment if there is none."""
    given = {"--gpus": gpus, "--data-dir": data_dir, "--python": python, "--requirements": requirements}
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    words += [word for package in extra for word in ("--with", package)]
    start = command(shlex.join(["run", *words, *(["--cpu"] if cpu else [])]))
    # a notebook runs in another folder
    settings = prepare.Preparation(gpus, data_dir and os.path.abspath(data_dir), here, (start, "..."))
    if not here:
        return str(environment.find_or_make(python, cpu, extra, requirements)), settings
    for name, value in (("extra", extra), ("requirements", requirements), ("python", python), ("cpu", cpu)):
        if value:
            raise UsageError(name, value, "does not work with --here; omit one of them")
    return sys.executable, settings


@common.command(
    context_settings={"allow_interspersed_args": False},
    examples="""
        gluon-mgpu run train.py --epochs 2
        gluon-mgpu run --gpus 4 multiple-gpus.ipynb
        gluon-mgpu run --with gluoncv==0.10.5 demo.py
        gluon-mgpu run -m pytest tests
        gluon-mgpu run --environment show
    """,
)
@common.option("-m", "is_module", is_flag=True, help="PROGRAM is the name of a module, as in `python -m`.")
@preparation
@common.option("--out", type=FILE, metavar="FILE", help="Write the executed notebook to FILE instead of NOTEBOOK.")
@common.option(
    "--environment",
    "action",
    type=click.Choice(["show", "remove"]),
    help="Show or remove the environments, without a program.",
)
@click.argument("program", metavar="PROGRAM|NOTEBOOK", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@click.pass_context
def run(
    context: click.Context,
    is_module: bool,
    out: str | None,
    action: str | None,
    program: str | None,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Run an MXNet 1.x program or notebook, unchanged, with a Python and packages of its time. They are installed once,
    in the user's cache. This sets MXNet up for this machine, uses CPU contexts in place of GPU contexts if there is no
    GPU, and replaces the dead downloads of MNIST and Fashion-MNIST. Otherwise, it is the same as `python PROGRAM`."""
    startup.check_environment()
    if action is not None:
        given = {name: value for name, value in {**options, "out": out}.items() if value not in (None, False, ())}
        if others := [*filter(None, [program]), *(setting(name) for name in given)]:
            raise UsageError("action", action, f"shows or removes all environments; omit {others[0]}")
        if action == "remove":
            environment.remove()
        click.echo("\n".join(environment.described()) or "no environments")
        return
    if program is None:
        raise click.UsageError("Missing argument 'PROGRAM|NOTEBOOK'.", context)
    is_notebook = program.endswith(".ipynb") and not is_module
    if is_notebook and arguments:
        raise UsageError(None, arguments[0], "a notebook takes no arguments; omit it")
    if out and not is_notebook:
        raise UsageError("out", out, "works only with notebooks; omit it")
    target = os.path.realpath(out or program)
    if is_notebook:
        for path in (os.path.dirname(target), *([target] if os.path.exists(target) else [])):
            if not os.access(path, os.W_OK):
                raise UsageError("out", out or program, f"cannot write to {path}; use another folder")
    if not is_module and program != "-" and not os.path.exists(program):
        raise UsageError(None, program, "no such file")
    if os.path.isfile(program) and b"SyncBatchNorm" in Path(program).read_bytes():
        os.environ.setdefault("MXNET_CPU_TEMP_COPY", contexts.SYNC_TEMP_COPIES)
    beside = Path(program).parent / "requirements.txt"
    if not (is_module or options["here"] or options["requirements"]) and beside.is_file():
        log.say(f"packages in {beside} are not installed; --requirements {shlex.quote(str(beside))} adds them")
    python, settings = python_and_settings(**options)
    after = shlex.join([*(["--out", out] if out else []), *(["-m"] if is_module else []), program, *arguments])
    if len(after) < LONGEST:
        settings = dataclasses.replace(settings, start=(settings.start[0], after))
    if is_notebook:
        words = ["-m", "gluon_mgpu.old.notebook", program, out or program]
    else:
        words = [*(["-m"] if is_module else []), program, *arguments]
    os.execve(python, [python, *words], prepare.variables(settings, python))  # nosec B606  # without a shell
