"""Scenarios in which a run starts: environment variables and command lines, valid and invalid."""

import functools
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
from box import ROOT, Skipped

from gluon_mgpu import exercises

NUMBERS = ("1", "2", "3", "0", "-1", "", " ", "x", "1.5", "true", "9" * 20, "٣", "1;2", "x" * 5000, "\udcff")
# Variables that must neither stop a run nor change its parameters, with their values. RUNS stands for a folder.
HARMLESS = """
LANG LC_ALL LC_CTYPE LC_NUMERIC LANGUAGE: C POSIX C.UTF-8 en_US.UTF-8 de_DE@euro nonsense ''
HOME TMPDIR XDG_CACHE_HOME XDG_CONFIG_HOME MXNET_HOME MPLCONFIGDIR: /nowhere /dev/null RUNS/é雪 ''
TERM TZ COLUMNS: dumb xterm-256color Asia/Tokyo 0 100000 nonsense ''
NO_COLOR TQDM_DISABLE PYTHONDEVMODE PYTHONFAULTHANDLER PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONNOUSERSITE: 1
MALLOC_ARENA_MAX MALLOC_CHECK_ MALLOC_PERTURB_: 0 1 8 165 x
MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ MALLOC_TOP_PAD_: 0 -1 4096 99999999999999 x
OMP_WAIT_POLICY OMP_STACKSIZE OMP_PROC_BIND OMP_PLACES OMP_DISPLAY_ENV: active passive 1M true false close cores {0} x
GOMP_SPINCOUNT GOMP_CPU_AFFINITY KMP_AFFINITY KMP_BLOCKTIME: 0 100 infinity 0-1 compact nonsense
MXNET_ENGINE_TYPE: ThreadedEnginePerDevice NaiveEngine
MXNET_CPU_TEMP_COPY MXNET_CPU_PRIORITY_NTHREADS: 1 4 100
MXNET_EXEC_BULK_EXEC_TRAIN MXNET_EXEC_BULK_EXEC_INFERENCE: 0 1 true false
PYTHONHASHSEED: 0 1 4294967295 random
PYTHONOPTIMIZE PYTHONSAFEPATH: 1
PYTHONUTF8 PYTHONCOERCECLOCALE: 0 1
PYTHONIOENCODING: ascii latin-1 utf-8:strict
PYTHONMALLOC: malloc debug pymalloc_debug
PYTHONWARNINGS: ignore default always nonsense
PYTHONPYCACHEPREFIX: /proc/nowhere /dev/null
PYTHONINTMAXSTRDIGITS: 640 0
MPLBACKEND: agg nonsense
"""
# Variables that may choose other instructions, libraries or numbers of threads, or that must be refused if invalid.
LIBRARIES = re.compile(rb"\b(?:MXNET|DMLC|PS|MKLDNN|DNNL|OPENBLAS|GOTO|OMP|GOMP)_[A-Z][A-Z0-9_]{2,40}")


@functools.cache
def names_in_libraries():
    """The environment variables that libmxnet.so mentions."""
    spec = importlib.util.find_spec("mxnet")
    library = Path(spec.origin).with_name("libmxnet.so").read_bytes()
    return sorted({name.decode() for name in LIBRARIES.findall(library)})


def harmless_values():
    """{name: values} from HARMLESS."""
    lines = [line.split(": ") for line in HARMLESS.strip().splitlines()]
    return {name: [v.strip("'") for v in values.split()] for names, values in lines for name in names.split()}


def surroundings(rng, box):
    """Up to 8 harmless variables in which Python starts, for the commands of any scenario."""
    values = harmless_values()
    drawn = drawn_variables(rng, box, [values], rng.randrange(9))
    return drawn if python_starts(box, drawn) else {}


def drawn_variables(rng, box, tables, count):
    """{name: value} of `count` variables, some perhaps equal, each from one of the tables {name: values}."""
    drawn = {}
    for _ in range(count):
        table = rng.choice(tables)
        name = rng.choice(list(table))
        drawn[name] = rng.choice(table[name]).replace("RUNS", str(box.folder / "runs"))
    return drawn


def python_starts(box, variables):
    """Whether Python, NumPy and Matplotlib start with these environment variables."""
    command = [sys.executable, "-c", "import numpy, matplotlib.figure"]
    return not subprocess.run(command, env={**box.environment, **variables}, capture_output=True).returncode


RESNET = {"dataset": "synthetic", "impl": "highlevel", "model": "resnet18"}
RESNET = {**RESNET, "limit": 64, "batch-size": 32, "gpus": 2, "epochs": 1, "seed": 1}


def environment(rng, box):
    """Up to 8 variables. Harmless ones change nothing; with any others, a run works or is refused."""
    plan, harmless, values = rng.choice((RESNET, *[box.plan()] * 9)), rng.random() < 0.5, harmless_values()
    box.undisturbed(plan)
    others = {name: NUMBERS for name in [*names_in_libraries(), "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]}
    drawn = drawn_variables(rng, box, [values] if harmless else [values, others, others], rng.randint(1, 8))
    if not python_starts(box, drawn):
        raise Skipped("Python, NumPy or Matplotlib does not start in this environment")
    allowed = [] if harmless else [box.folder / "cwd"]  # MXNet's profiler writes there
    done = box.train(plan, "--out", box.out, environment=drawn, paths=allowed)
    if not harmless:
        box.check_checkpoint()
        return
    box.require(done.status == 0, "fails in a harmless environment", done)
    box.same_bits(box.out, box.undisturbed(plan), done)


# Values for options whose cost grows with them; every other option gets any value.
CHEAP = {
    "epochs": "1 2 0 -1 x 1.0",
    "limit": "1 99 200 300 0 -5 x",
    "num_gpus": "1 2 3 8 0 -1 0,1 1,0 0,0 2, , 1025 x 0,2,5 1.5",
    "workers": "1 2 0 129 x",
    "servers": "1 2 0 129 x",
    "restarts": "0 1 -1 1001 x",
    "kvstore": "local horovod dist_sync x",
    "batch_size": "1000000000000 200 64 7 1 0 -1 x",
    "grad_accum_steps": "1 2 7 64 0 x",
}
TEXTS = "0 -0 1 -1 0.1 0.99999999999999999999 1e-37 1e-38 1e37 1e39 nan inf -inf 2147483647 2147483648 0x10 1_0 ٣ ½ abc"
TEXTS += " --epochs -x é🔥 1,2 2,1 1,1 , nan,nan 80,20 auto fp16 2bit:0.5 2bit: \udcff " + "9" * 400 + " " + "x" * 5000
PATHS = "new é雪\u202e🔥 \udcff - a/b/c/d run/ ~ /dev/null /dev/full /proc/nothing /dev/null/x file folder RUN"
PATHS += " RUN/config.json RUN/checkpoint.npz " + " ".join(["x" * 255, "x" * 256, "/".join(["y" * 200] * 30)])
BLANKS = ["", " ", "a\nb", "\x1b[1m"]


def value(rng, option):
    """A value for an option, which may be invalid. RUN stands for the folder of a run."""
    if isinstance(option.type, click.Choice) and rng.random() < 0.9:
        return rng.choice(option.type.choices)
    texts = CHEAP.get(option.name) or (PATHS if isinstance(option.type, click.Path) else TEXTS)
    return rng.choice(BLANKS + texts.split() * 3)


# {command: its arguments}
COMMANDS = {
    "train": "",
    "evaluate": "RUN",
    "convert": "--to=gluon RUN net",
    "launch": "-- true",
    "doctor": "",
    "run": "program.py",
    "exercise list": "",
    "exercise start": "allreduce",
    "exercise check": "answer.py",
    "kernel install": "",
    "kernel uninstall": "",
}
SMALL = {"train": "--dataset=synthetic --epochs=1 --limit=200 --batch-size=50"}  # what is not drawn is small


def command_line(rng, box):
    """Any options with any values: the command works, or it is refused with one line and has written nothing."""
    name, _, subcommand = rng.choice([*COMMANDS, *["train"] * 8, "evaluate"]).partition(" ")
    command = getattr(importlib.import_module(f"gluon_mgpu.commands.{name}"), name)
    arguments = COMMANDS[f"{name} {subcommand}".strip()]
    command = command.commands[subcommand] if subcommand else command
    run = box.folder / "cwd" / "run"
    shutil.copytree(box.undisturbed(box.plan()), run)
    (box.folder / "cwd" / "file").write_text("a file")
    (box.folder / "cwd" / "program.py").write_text("import mxnet")
    (box.folder / "cwd" / "answer.py").write_text(exercises.solution("allreduce"))
    (box.folder / "cwd" / "folder").mkdir()
    left_out = ("debug", "version", "is_module", "sys_prefix")  # the last would write into this environment
    options = [p for p in command.params if isinstance(p, click.Option) and p.name not in left_out]
    words = []
    for option in rng.sample(options, min(len(options), rng.choice((1, 2, 3, 5, 8)))):
        flag = rng.choice(option.opts + option.secondary_opts)
        words.append(flag if option.is_flag else f"{flag}={value(rng, option)}")
    arguments = arguments.split()
    if arguments and name != "run" and rng.random() < 0.3:
        arguments[-1] = rng.choice(PATHS.split())
    words = [*subcommand.split(), *SMALL.get(name, "").split(), *words, *arguments]
    before, paths = box.files(), [box.folder / "cwd", *([box.folder / "home"] if name == "kernel" else [])]
    done = box.run(
        [sys.executable, ROOT / f"scripts/{name}.py", *(word.replace("RUN", str(run)) for word in words)], paths=paths
    )
    if done.status == 2:
        changed = sorted(path for path, _ in box.files().items() ^ before.items())
        box.require(not changed, f"refuses the command, but changed {changed}", done)


SCENARIOS = {"environment": (environment, 3), "command line": (command_line, 3)}
