"""The command line: --help, the line for a wrong command, exit statuses, completion."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gluon_mgpu.commands import common
from gluon_mgpu.commands.launch import launch
from gluon_mgpu.commands.main import main
from gluon_mgpu.commands.train import train
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError
from gluon_mgpu.training.settings import NAMES, Settings

ROOT = Path(__file__).parents[2]
CONTEXT = click.Context(main)
COMMANDS = {name: main.get_command(CONTEXT, name) for name in main.list_commands(CONTEXT)}
IN_ALL = {"--debug", "--help", "--version"}


def options(command):
    return [param for param in command.params if isinstance(param, click.Option)]


def call(capsys, command, *words, program="gluon-mgpu"):
    """(exit status, standard output, standard error) of a command."""
    with pytest.raises(SystemExit) as ended:
        command.main([*words], prog_name=program)
    return (ended.value.code, *capsys.readouterr())


def wrong(capsys, line):
    """The error of a wrong command: one line on standard error, and exit status 2."""
    status, out, err = call(capsys, main, *shlex.split(line))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    return err.removeprefix("error: ")


def test_the_same_option_has_the_same_heading_in_every_command(capsys):
    heading_of = {}
    for name, command in COMMANDS.items():
        parts = re.split(r"^(\w[\w ]*):$", call(capsys, main, name, "--help")[1], flags=re.MULTILINE)
        shown = {
            option: heading
            for heading, text in zip(parts[1::2], parts[2::2])
            for option in re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE)
        }
        assert shown.keys() - IN_ALL == {param.opts[0] for param in options(command)} - IN_ALL
        for option, heading in shown.items():
            assert heading_of.setdefault(option, heading) == heading
            assert (heading == "Other options") == (option in IN_ALL)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text_and_h_shows_what_help_shows(capsys, name):
    assert all(param.help for param in options(COMMANDS[name]))
    shown = call(capsys, main, name, "--help")
    assert shown[0] == 0 and shown == call(capsys, main, name, "-h")


def parsed(line):
    """(command, options) that click finds in a shell command."""
    program, name, *words = shlex.split(line)
    assert program == "gluon-mgpu"
    return COMMANDS[name], None if words == ["--help"] else COMMANDS[name].make_context(name, words).params


@pytest.mark.parametrize("command", [main, *COMMANDS.values()], ids=["main", *COMMANDS])
def test_the_examples_in_help_are_valid_commands(command):
    assert command.examples
    for line in command.examples:
        called, values = parsed(line)
        assert called is command or command is main
        if called is train and values and not (values["recipe"] or values["resume"]):
            Settings(**{name: values[name] for name in NAMES})
        if called is launch:
            inner, its = parsed(shlex.join(values["command"]))
            assert inner is train and its["kvstore"] == "dist_sync"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_is_the_installed_command_under_its_own_name(capsys, name):
    script = f"scripts/{name.replace('-', '_')}.py"
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    installed = call(capsys, main, name, "--help")[1]
    renamed = re.sub(r"gluon-mgpu ([a-z][\w-]*)", lambda m: f"python scripts/{m[1].replace('-', '_')}.py", installed)
    assert done.stdout.split() == renamed.split()


@pytest.mark.parametrize(
    "line, parts",
    [
        ("train --batchsize 64", ["--batchsize", "did you mean --batch-size?", "gluon-mgpu train --help"]),
        ("train -epochs 3", ["-epochs", "did you mean --epochs?"]),
        ("trian --gpus 2", ["trian", "did you mean train?"]),
        ("train --impl torch", ["--impl: 'torch'", "'scratch', 'highlevel'"]),
        ("train --dataset FashionMNIST", ["did you mean fashion-mnist?"]),
        ("train --seed abc", ["--seed: 'abc' is not a whole number ("]),
        ("train --lr 0,1", ["--lr: '0,1' is not a number ("]),
        ("train --lr 0", ["--lr 0.0: "]),
        ("train --shares fast", ["--shares: 'fast'", "auto"]),
        ("parity --seeds 4,4", ["--seeds: '4,4'"]),
        ("launch --workers 0 -- true", ["--workers: 0"]),
        ("evaluate", ["RUN"]),
        ("train --out", ["--out"]),
        # found by Settings and others, which name arguments of Python
        ("train --lr nan", ["--lr nan: "]),
        ("train --gpus two", ["--gpus two: "]),
        ("walkthrough --gpus 1,1", ["--gpus 1,1: "]),
        ("train --accumulate 300", ["--accumulate 300: "]),
        ("train --schedule step", ["--schedule step: ", "--step-epochs"]),
        ("train --step-epochs 2", ["--step-epochs 2: ", "--schedule step"]),
        ("train --compress fp16", ["--compress fp16: "]),
        ("train --kvstore horovod", ["--kvstore horovod: "]),
        ("train --device gpu --dataset synthetic", ["--device gpu: ", "--device cpu"]),
        ("train --resume /nonexistent", ["/nonexistent"]),
        ("train --data-dir /nonexistent", ["/nonexistent"]),
        ("train --no-tune", ["--no-tune", "highlevel"]),
        ("train --recipe gluon-lenet-mnist-1gpu --resume runs/first", ["--recipe", "--resume"]),
        ("train --tensorboard --dataset synthetic", ["--tensorboard"]),
        ("evaluate runs/first coat.png", ["coat.png", "--images"]),
        ("parity --quick --seeds 3", ["--quick", "--seeds"]),
    ],
)
def test_a_wrong_command_is_one_line_that_names_the_option_and_exit_status_2(capsys, line, parts):
    error = wrong(capsys, line)
    assert all(part in error for part in parts), error


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_with_a_letter_missing_is_suggested(capsys, name):
    for param in options(COMMANDS[name]):
        option = param.opts[0]
        mistyped = option[: len(option) // 2] + option[len(option) // 2 + 1 :]
        assert f"did you mean {option}?" in wrong(capsys, f"{name} {mistyped}")


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_takes_the_next_option_for_its_value(capsys, name):
    for param in options(COMMANDS[name]):
        if not param.is_flag:
            error = wrong(capsys, f"{name} {param.opts[0]} --data-dir x")
            assert param.opts[0] in error and "extra argument" not in error


@pytest.mark.parametrize("words", [["--impl", "a\nb"], ["--a\nb"], ["a\nb"]], ids=repr)
def test_an_error_is_one_line_whatever_the_user_typed(capsys, words):
    status, out, err = call(capsys, main, "train", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_a_group_without_a_command_shows_its_help_and_fails(capsys):
    status, out, err = call(capsys, main)
    assert (status, out) == (2, "") and "\nCommands:\n" in err


@pytest.mark.parametrize(
    "error, status, line",
    [
        (Error("run `gluon-mgpu batch-size -h`"), 1, "error: run `python scripts/batch_size.py -h`"),
        (UsageError("runs/x: no run"), 2, "error: runs/x: no run"),
        (UsageError("out=a=b: omit two_words=1"), 2, "error: --out a=b: omit --other 1"),
        (UsageError("fast=True: needs out=FOLDER"), 2, "error: --fast: needs --out FOLDER"),
        (UsageError("runs/out=1 has no fast=True"), 2, "error: runs/out=1 has no fast=True"),
        (ValueError("first\nlast"), 1, "error: ValueError: last (--debug shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Interrupted("interrupted after 1 epoch"), 130, "interrupted after 1 epoch"),
    ],
)
def test_an_error_is_one_line_in_the_terms_of_the_command_line(capsys, error, status, line):
    @click.command(cls=common.Command)
    @common.option("--out")
    @common.option("--other", "two_words")
    @common.option("--seed")
    @click.option("--fast/--no-fast")
    def fails(**options):
        raise error

    said = call(capsys, fails, program="python scripts/train.py")
    assert said == (status, "", f"{line}\n")
    status, _, err = call(capsys, fails, "--debug")
    assert err.startswith("Traceback")


@pytest.fixture
def shell(tmp_path):
    """The environment of a shell that finds gluon-mgpu. `import mxnet` there creates the file `imported`, and exits."""
    (tmp_path / "mxnet.py").write_text(f"import os; open({str(tmp_path / 'imported')!r}, 'w'); os._exit(9)\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}


COMPLETE = """
eval "$(_GLUON_MGPU_COMPLETE=bash_source gluon-mgpu)"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_gluon_mgpu_completion gluon-mgpu
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    "words, offered",
    [
        (["t"], {"train"}),
        (["train", "--gpus", "2", "--impl", ""], {"scratch", "highlevel"}),
        (["train", "--device", "="], {"auto", "gpu", "cpu"}),  # bash splits --device= into two words
        (["train", "--kvstore", "dist_sync", "--compress", "2"], {"2bit:0.5"}),
        (["train", "--impl", "torch", "--mod"], {"--model"}),  # an earlier word may be wrong
        (["doctor", "--data"], {"--data-dir"}),
    ],
)
def test_bash_completes_commands_options_and_words_without_importing_mxnet(shell, tmp_path, words, offered):
    bash = ["bash", "--norc", "-c", COMPLETE, "bash", "gluon-mgpu", *words]
    done = subprocess.run(bash, env=shell, capture_output=True, text=True)
    assert (done.returncode, done.stderr, set(done.stdout.split())) == (0, "", offered)
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "words, kind",
    [
        ("train --out ru", "dir"),
        ("evaluate ru", "dir"),
        ("doctor --data-dir ru", "dir"),
        ("train --profile ru", "file"),
        ("evaluate runs/first --images ru", "file"),
        ("launch --workers 2 -- ru", "file"),
    ],
)
def test_the_shell_completes_folders_and_files(shell, words, kind):
    environment = {**shell, "_GLUON_MGPU_COMPLETE": "bash_complete", "COMP_WORDS": f"gluon-mgpu {words}"}
    environment["COMP_CWORD"] = str(len(words.split()))
    done = subprocess.run(["gluon-mgpu"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{kind},ru\n", "")
