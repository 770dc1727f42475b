"""The command line as a user meets it: what --help says, what a mistyped word is answered with, what TAB completes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from gluon_mgpu.commands.common import main as cli
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import records
from gluon_mgpu.training.settings import MODELS, SGD, Settings

ROOT = Path(__file__).parents[1]
OF_ALL = {"--debug", "--help", "--version"}


def every(command=cli.main, path="gluon-mgpu"):
    """(path, command) of every command there is."""
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from every(sub, f"{path} {name}")


ALL = list(every())
ENDS = [(path, command) for path, command in ALL if not isinstance(command, click.Group)]


def options(command):
    return [param for param in command.params if isinstance(param, click.Option)]


def run(capsys, *words):
    """(exit status, standard output, standard error) of gluon-mgpu."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words), prog_name="gluon-mgpu")
    return (ended.value.code, *capsys.readouterr())


def help_of(capsys, path):
    """{heading: its text} of a command's --help."""
    status, said, _ = run(capsys, *path.split()[1:], "--help")
    assert status == 0
    parts = re.split(r"^(\w[\w ]*):$", said, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def test_every_option_stands_under_a_heading_that_is_the_same_in_all_commands(capsys):
    heading_of = {}
    for path, command in ENDS:
        shown = {
            name: heading
            for heading, text in help_of(capsys, path).items()
            for name in re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
        }
        assert shown.keys() - OF_ALL == {param.opts[0] for param in options(command)} - OF_ALL, path
        assert {name for name, heading in shown.items() if heading == "Other options"} <= OF_ALL, path
        for name, heading in shown.items():
            assert heading_of.setdefault(name, heading) == heading, (path, name)
    assert len({*heading_of.values()}) > 5


def test_help_shows_the_words_and_the_default_of_every_option(capsys):
    for path, command in ENDS:
        text = "".join(help_of(capsys, path).values())
        for param in options(command):
            part = re.search(rf"^  {param.opts[0]}\b(?!-).*(\n {{3,}}.*)*", text, re.MULTILINE)[0]
            part = " ".join(part.split()).replace("- ", "-")  # wrapped there
            assert param.help and part.partition(" ")[2], (path, param)
            if isinstance(param.type, click.Choice) and param.name != "recipe":  # --list-recipes has these
                assert f"[{'|'.join(param.type.choices)}]" in part
            default = param.to_info_dict()["default"]
            if default not in (None, ()) and not param.is_flag:
                words = default if isinstance(default, (list, tuple)) else [default]
                assert f"default: {', '.join(map(str, words))}" in part, (path, part)


def shown_range(name):
    """(low, what stands between it and x, between x and high, high) in --help of train; None: no such end."""
    param = next(param for param in options(cli.train) if param.name == name)
    found = re.search(r"\[.*?(?:(\d\S*?)(<=?))?x(?:(<=?)([^\s;]+))?(?:(>=?)(\d+))?\]$", param.help)
    low, low_sign, high_sign, high, above, least = found.groups()
    high = {"epochs": 4, "batch-size": 256}.get(high, high)
    if above:
        low, low_sign = least, above.replace(">", "<")
    return low and float(low), low_sign, high_sign, high and float(high)


RANGED = [param.name for param in options(cli.train) if re.search(r"[\[ ;]\S*x[<>]\S*\]$", param.help)]


@pytest.mark.parametrize("name", RANGED)
def test_the_range_that_help_shows_is_the_one_that_is_kept(name):
    whole = isinstance(getattr(SGD, name), int) or name in ("limit", "seed", "step_epochs")
    low, low_sign, high_sign, high = shown_range(name)
    near = 1 if whole else 1e-3
    inside, outside = [], []
    for end, sign, inwards in ((low, low_sign, near), (high, high_sign, -near)):
        if end is not None:
            inside += [end, end + inwards] if sign == "<=" else [end + inwards]
            outside += [end - inwards] if sign == "<=" else [end, end - inwards]
    assert inside and outside
    for values, right in ((inside, True), (outside, False)):
        for value in values:
            given = {name: int(value) if whole else value}
            if name in ("step_epochs", "step_factor"):
                given = {"step_epochs": (2,), **given, "schedule": "step"}
            if name == "step_epochs":
                given[name] = (given[name],)
            if right:
                Settings(**given)
            else:
                with pytest.raises(UsageError, match=name):
                    Settings(**given)


def test_the_ranges_are_those_of_all_numbers_that_determine_a_run():
    numbers = {param.name for param in options(cli.train) if param.name in records.SETTINGS and not param.is_flag}
    assert set(RANGED) == numbers - {"model", "dataset", "schedule", "shares"}


def parsed(line):
    """The command that a line for a shell calls, and its options, by click itself."""
    program, *words = shlex.split(line)
    assert program == "gluon-mgpu"
    command, path = cli.main, program
    while isinstance(command, click.Group):
        command, path = command.commands[words[0]], f"{path} {words[0]}"
        del words[0]
    if words == ["--help"]:
        return command, None
    return command, command.make_context(path, words).params


@pytest.mark.parametrize("path, command", ALL, ids=[path for path, _ in ALL])
def test_the_examples_of_a_command_can_be_run_as_they_stand(path, command):
    assert command.examples
    for line in command.examples:
        for part in line.split(" && "):
            called, params = parsed(part)
            assert called is command or isinstance(command, click.Group) or part != line
            if called is cli.train and params and not (params["recipe"] or params["resume"]):
                Settings(**{name: params[name] for name in records.SETTINGS})
            if called is cli.launch:
                inner, its = parsed(shlex.join(params["command"]))
                assert inner is cli.train and its["kvstore"] == "dist_sync"


@pytest.mark.parametrize("script", sorted({path.name for path in (ROOT / "scripts").glob("*.py")} - {"start.py"}))
def test_the_examples_of_a_script_name_it_and_are_those_of_the_installed_command(script):
    command = [sys.executable, f"scripts/{script}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: python scripts/{script} ")
    shown = [line.strip() for line in done.stdout.partition("Examples:\n")[2].splitlines()]
    if script == "build_horovod.py":
        assert shown == ["make horovod"]
        return
    assert all(line.startswith(f"python scripts/{script}") for line in shown)
    name = script.removesuffix(".py").replace("_", "-")
    as_installed = [re.sub(r"python scripts/(\w+)\.py", r"gluon-mgpu \1", line).replace("_", "-") for line in shown]
    assert as_installed == [line.replace("_", "-") for line in cli.main.commands[name].examples]


@pytest.mark.parametrize(
    "path, words, line",
    [
        ("train", "--batchsize 64", "--batchsize: no such option; did you mean --batch-size?"),
        ("train", "-epochs 3", "-epochs: no such option; did you mean --epochs?"),
        ("train", "--no-hybridise", "--no-hybridise: no such option; did you mean --no-hybridize?"),
        ("train", "--frobnicate", "--frobnicate: no such option"),
        ("train", "--images x", "--images: no such option"),  # evaluate's; --shares is not meant
        ("train", "--decay 0.1", "--decay: no such option; did you mean --weight-decay?"),
        ("evaluate", "--run runs/first", "--run: no such option"),  # RUN is no option
        ("bench model", "--uot x", "--uot: no such option; did you mean --out?"),
        ("", "trian --gpus 2", "trian: no such command; did you mean train?"),
        ("bench", "alreduce", "alreduce: no such command; did you mean allreduce?"),
        ("", "deploy", "deploy: no such command"),
        ("train", "--impl torch", "--impl torch: choose one of scratch, highlevel"),
        (
            "walkthrough",
            "--impl HighLevel",
            "--impl HighLevel: choose one of scratch, highlevel; did you mean highlevel?",
        ),
        (
            "train",
            "--dataset FashionMNIST",
            "--dataset FashionMNIST: choose one of fashion-mnist, mnist, synthetic; did you mean fashion-mnist?",
        ),
        (
            "bench timeline",
            "--model resnet",
            f"--model resnet: choose one of {', '.join(MODELS)}; did you mean resnet18?",
        ),
        (
            "train",
            "--kvstore dist-sync",
            "--kvstore dist-sync: choose one of local, horovod, dist_sync; did you mean dist_sync?",
        ),
        ("train", "--lr 0,1", "--lr '0,1' is no number: give one such as 0.1"),
        ("train", "--batch-size 1e3", "--batch-size '1e3' is no whole number: give one such as 4"),
        ("bench steps", "--rounds ten", "--rounds 'ten' is no whole number: give one such as 4"),
        ("train", "--shares fast", "--shares fast: give numbers with commas between them, or auto"),
        ("bench steps", "--rounds 1", "--rounds 1 is not in the range x>=3"),
        ("train", "lenet", "Got unexpected extra argument (lenet)"),
        ("evaluate", "", "Missing argument 'RUN'"),
    ],
)
def test_a_wrong_command_is_one_line_that_names_what_is_wrong_and_the_nearest_that_is_right(capsys, path, words, line):
    called = " ".join(["gluon-mgpu", *path.split()])
    said = run(capsys, *path.split(), *words.split())
    assert said == (2, "", f"error: {line} ({called} --help shows more)\n")


@pytest.mark.parametrize("path, command", ENDS, ids=[path for path, _ in ENDS])
def test_an_option_without_one_of_its_letters_leads_back_to_it(capsys, path, command):
    for param in options(command):
        right, middle = param.opts[0], len(param.opts[0]) // 2
        wrong = right[:middle] + right[middle + 1 :]
        said = run(capsys, *path.split()[1:], wrong)[2]
        assert said.startswith(f"error: {wrong}: no such option; did you mean {right}?"), said


@pytest.mark.parametrize("words", [("--impl", "a\nb"), ("--a\nb",), ("a\nb",), ("--lr",)], ids=repr)
def test_what_is_wrong_is_said_in_one_line_whatever_it_holds(capsys, words):
    status, out, err = run(capsys, "train", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("path", [path for path, command in ALL if isinstance(command, click.Group)])
def test_the_list_of_commands_says_in_a_whole_sentence_what_each_is_for(capsys, path):
    rows = re.findall(r"^  [\w-]+  +(.+)$", help_of(capsys, path)["Commands"], re.MULTILINE)
    assert len(rows) >= 8 and all(row.endswith(".") and not row.endswith("...") for row in rows), rows


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_a_group_without_a_command_shows_its_help_and_was_wrong(capsys, words):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "") and "\nCommands:\n" in err and "\nExamples:\n" in err


@pytest.fixture
def shell(tmp_path):
    """The environment of a shell in which gluon-mgpu can be called, and `import mxnet` leaves a file and ends."""
    (tmp_path / "mxnet.py").write_text(f"import os; open({str(tmp_path / 'imported')!r}, 'w'); os._exit(9)\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}


COMPLETE = """
eval "$(_GLUON_MGPU_COMPLETE=bash_source gluon-mgpu)"
complete -p gluon-mgpu > /dev/null || exit 1
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_gluon_mgpu_completion gluon-mgpu
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    "words, offered",
    [
        (("t",), {"train"}),
        (("bench", "a"), {"async", "allreduce"}),
        (("train", "--ba"), {"--batch-size"}),
        (("train", "--gpus", "2", "--impl", ""), {"scratch", "highlevel"}),
        (("train", "--device", "="), {"auto", "gpu", "cpu"}),  # bash takes --device= apart
        (("train", "--recipe", "scratch"), {f"scratch-lenet-fashion-mnist-{n}gpu" for n in (1, 2)}),
        (("train", "--kvstore", "dist_sync", "--compress", "2"), {"2bit:0.5"}),
        (("train", "--impl", "torch", "--mod"), {"--model"}),  # a wrong word before does not end it
        (("doctor", "--data"), {"--data-dir"}),
    ],
)
def test_bash_completes_commands_options_and_words_without_importing_mxnet(shell, tmp_path, words, offered):
    bash = ["bash", "--norc", "-c", COMPLETE, "bash", "gluon-mgpu", *words]
    done = subprocess.run(bash, env=shell, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.split()) == offered
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "words, kind",
    [
        ("train --out ru", "dir"),
        ("train --resume ru", "dir"),
        ("evaluate ru", "dir"),
        ("bench model ru", "dir"),
        ("doctor --data-dir ru", "dir"),
        ("train --profile ru", "file"),
        ("evaluate runs/first --images ru", "file"),
        ("launch --workers 2 -- ru", "file"),
    ],
)
def test_folders_and_files_are_left_to_the_shell(shell, tmp_path, words, kind):
    asked = {"_GLUON_MGPU_COMPLETE": "bash_complete", "COMP_WORDS": f"gluon-mgpu {words}"}
    asked["COMP_CWORD"] = str(len(words.split()))
    done = subprocess.run(["gluon-mgpu"], env={**shell, **asked}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{kind},ru\n", "")
    assert not (tmp_path / "imported").exists()


def test_the_mxnet_that_must_not_be_imported_there_would_be_seen(shell, tmp_path):
    done = subprocess.run([sys.executable, "-c", "import mxnet"], env=shell)
    assert done.returncode == 9 and (tmp_path / "imported").exists()
