"""The command line: --help, the error line for an invalid command, exit statuses, completion."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import runs
from runs import ROOT, call, error, finished

from gluon_mgpu.commands import common
from gluon_mgpu.commands.main import main
from gluon_mgpu.exercises import solution
from gluon_mgpu.support import subprocesses
from gluon_mgpu.support.errors import Error, UsageError, command, setting

CONTEXT = click.Context(main)
COMMANDS = {name: main.get_command(CONTEXT, name) for name in main.list_commands(CONTEXT)}


EXAMPLES = {line for shown in (main, *COMMANDS.values()) for line in shown.examples}


@pytest.mark.parametrize("line", sorted(EXAMPLES))
def test_an_example_in_help_is_a_valid_command(line):
    program, name, *words = shlex.split(line)
    assert program == "gluon-mgpu"
    if words != ["--help"]:
        COMMANDS[name].make_context(name, words).close()


@pytest.mark.parametrize(
    "line, parts",
    [
        ("train --batchsize 64", ["--batchsize", "--batch-size", "gluon-mgpu train --help"]),
        ("trian --gpus 2", ["trian"]),
        ("train --impl torch --dataset synthetic", ["--impl torch: ", "scratch, highlevel"]),
        ("train --seed abc", ["--seed", "abc"]),
        ("train --out ''", ["--out"]),
        ("evaluate", ["RUN"]),
        (f"evaluate {'x' * 300}", ["RUN", "x" * 300]),
        ("run --cpu --here -m tool", ["--cpu", "--here"]),
        # errors found by Config and other code that is also called from Python
        ("train --lr nan", ["--lr", "nan"]),
        ("check nothere.py", ["nothere.py: must", "scratch, highlevel"]),
        ("train --warmup-epochs 4", ["--warmup-epochs 4.0: "]),
        ("train --tune --dataset synthetic --limit 600", ["--tune", "highlevel"]),
        ("train --impl 'a\nb' --dataset synthetic --limit 600", ["--impl"]),  # one line, whatever the user typed
        ("convert runs/first out", ["--to", "gluon, pytorch, onnx"]),
        ("convert net.params", ["net.params", "load_parameters", "export"]),
    ],
)
def test_a_wrong_command_is_one_line_that_names_the_option_and_exit_status_2(capsys, line, parts):
    said = error(capsys, main, *shlex.split(line))
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(
    "raised, status, line",
    [
        (lambda: Error(f"run `{command('doctor -h')}`"), 1, "error: run `python -m gluon_mgpu doctor -h`"),
        (lambda: UsageError(None, "runs/x", "not a run"), 2, "error: runs/x: not a run"),
        (lambda: UsageError("out", "a=b", f"omit {setting('two_words', 1)}"), 2, "error: --out a=b: omit --other 1"),
        (lambda: UsageError("out", "my runs/a", "omit it"), 2, "error: --out 'my runs/a': omit it"),
        (lambda: UsageError("flag", False, "omit it"), 2, "error: --no-flag: omit it"),
        (lambda: UsageError("lr", (1, 0.5), "not an option here"), 2, "error: lr=(1, 0.5): not an option here"),
        (lambda: ValueError("first\nlast"), 1, "error: ValueError: last (--debug shows the traceback)"),
        (lambda: KeyboardInterrupt(), 130, "interrupted"),
        (lambda: KeyboardInterrupt(f"continue with {setting('out', 'runs/a')}"), 130, "continue with --out runs/a"),
    ],
)
def test_an_error_is_one_line_in_the_terms_of_the_command_line(capsys, raised, status, line):
    @click.command(cls=common.Command)
    @common.option("--out")
    @common.option("--other", "two_words")
    @common.option("--flag/--no-flag")
    @common.option("--seed")
    def fails(**options):
        raise raised()

    said = call(capsys, fails, program="python scripts/train.py")
    assert said == (status, "", f"{line}\n")
    assert call(capsys, fails, "--debug")[2].startswith("Traceback")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["--help", "exercise list"])
def test_output_that_cannot_be_written_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = runs.gluon_mgpu(*words.split(), stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 1 and done.stderr.startswith("error: cannot print") and done.stderr.count("\n") == 1


def test_modules_in_the_current_folder_hide_no_others(tmp_path):
    for name in ("random", "tempfile", "numpy", "mxnet"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('hidden')")
    (tmp_path / "allreduce.py").write_text(solution("allreduce"))
    done = runs.gluon_mgpu("exercise", "grade", "allreduce.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    child = finished(*subprocesses.python("import random, numpy; print(numpy.pi)"), cwd=tmp_path)
    assert child.stdout.startswith("3.14"), child.stderr


@pytest.mark.parametrize("words, shown", [("--debug missing.py", True), ("missing.py --debug", False)])
def test_debug_after_a_program_is_the_programs(capsys, words, shown):
    assert call(capsys, main, "run", *words.split())[2].startswith("Traceback") == shown


ENDED = """
import os, signal, time
import click
from gluon_mgpu.__main__ import run_command
from gluon_mgpu.commands import common

@click.command(cls=common.Command)
def ended():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)

run_command("__main__", "ended")
"""


def test_sigterm_ends_a_command_like_ctrl_c():
    done = finished(sys.executable, "-c", ENDED)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    "line, offered",
    [
        ("t", {"plain,train"}),
        ("train --device =", {"plain,auto", "plain,gpu", "plain,cpu"}),  # bash splits --device= into two words
        ("train --out ru", {"dir,ru"}),
        ("exercise start ac", {"plain,accumulate"}),
    ],
)
def test_the_shell_completes_commands_options_words_and_files_without_importing_mxnet(tmp_path, line, offered):
    (tmp_path / "mxnet.py").write_text("import os; os._exit(9)")
    environment = {"PYTHONPATH": str(tmp_path), "_GLUON_MGPU_COMPLETE": "bash_complete"}
    environment.update(COMP_WORDS=f"gluon-mgpu {line}", COMP_CWORD=str(len(line.split(" "))))
    done = finished(Path(sys.executable).with_name("gluon-mgpu"), env={**os.environ, **environment})
    assert (done.returncode, done.stderr, set(done.stdout.split())) == (0, "", offered)


@pytest.mark.parametrize("script", ["train", "bench"])  # a command of the package, and one of scripts/
def test_a_script_starts_if_python_does_not_import_from_its_folder(script):
    done = finished(sys.executable, f"scripts/{script}.py", "-h", cwd=ROOT, env={**os.environ, "PYTHONSAFEPATH": "1"})
    assert (done.returncode, done.stderr) == (0, "")
