"""The scenarios: processes that are signalled, disks and files that fail, environments and command lines."""

import errno
import functools
import importlib
import importlib.util
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import click
from box import Box, Skipped, be_ordinary
from runs import ROOT

from gluon_mgpu import exercises
from gluon_mgpu.training import checkpoint, records

SIGNALS = [signal.Signals[f"SIG{name}"] for name in "KILL KILL TERM INT STOP HUP PIPE".split()]
SHORT = 2.0  # seconds that a process may be stopped; after 10, a run counts it as lost


class Send:
    """A fault: sends a signal to a process of the command, at a moment drawn when it is created."""

    def __init__(self, rng, seconds, signals=SIGNALS, workers=1):
        self.which = rng.choice(signals)
        self.moment = rng.choice(("time", "time", "line", "epoch", "saving"))
        self.delay = rng.uniform(0, seconds * 1.1 if self.moment == "time" else seconds / 4)
        self.stopped = rng.uniform(0.05, SHORT)
        self.anyone, self.draw = workers > 1, rng.random()

    def __call__(self, box, process, sent):
        if not self._wait(box, process):
            return
        target = process.pid
        if self.anyone and (others := box.processes()):
            target = others[int(self.draw * len(others))]
        with suppress(ProcessLookupError, FileNotFoundError):
            ignored = int(re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{target}/status").read_text())[1], 16)
            if self.which == signal.SIGPIPE and not ignored >> (signal.SIGPIPE - 1) & 1:
                return  # Python has not started yet
            os.kill(target, self.which)
            sent.append(int(self.which))
            if self.which == signal.SIGSTOP:
                time.sleep(self.stopped)
                os.kill(target, signal.SIGCONT)

    def _wait(self, box, process):
        """Wait for the moment. Returns False if the command ends first."""
        lines = {"line": b"running on", "epoch": b"epoch 1"}
        runs = box.folder / "runs"
        while self.moment != "time" and process.poll() is None:
            if self.moment == "saving" and any(runs.glob("*/.*.part")):
                return True
            if self.moment in lines and lines[self.moment] in (box.folder / "out").read_bytes():
                break
            time.sleep(0.0005 if self.moment == "saving" else 0.01)
        with suppress(Exception):
            process.wait(self.delay)
        return process.poll() is None


def disturb(rng, box, plan):
    seconds = box.usual_seconds(plan)
    for _ in range(rng.randint(1, 3)):
        faults = [Send(rng, seconds, workers=plan.get("workers", 1)) for _ in range(rng.randint(1, 3))]
        done = box.go_on(plan, faults=faults)
        box.check_checkpoint()
        if {fault.which for fault in faults} <= {signal.SIGSTOP, signal.SIGPIPE}:  # Python ignores SIGPIPE
            box.require(done.status == 0, "a short stop or SIGPIPE ends the run", done)
    box.finish(plan)


def signals(rng, box):
    """Up to 3 signals for one process, up to 3 times. The result must equal that of an undisturbed run, bit for bit."""
    disturb(rng, box, box.plan())


def workers(rng, box):
    """The same for random processes of a run of 2 to 4 workers."""
    disturb(rng, box, box.plan(rng.choice((2, 2, 3, 4))))


def horovod(rng, box):
    """The same for runs of 2 to 4 workers with Horovod, including its launcher."""
    if not importlib.util.find_spec("horovod"):
        raise Skipped("Horovod is not installed")
    disturb(rng, box, box.plan(rng.choice((2, 2, 3, 4)), "horovod"))


def restarts(rng, box):
    """`launch --restarts`: a run that loses processes repeatedly ends up equal to an undisturbed run, bit for bit."""
    plan = box.plan(rng.choice((2, 2, 4)))
    seconds = box.usual_seconds(plan)
    delays = [rng.uniform(0.1, 1) * seconds for _ in range(rng.randint(1, 3))]
    checkpoints = []  # for each kill, whether there was a checkpoint

    def kill_some(box, process, sent):
        for delay in delays:
            with suppress(subprocess.TimeoutExpired):
                process.wait(delay)
            others = [pid for pid in box.processes() if pid != process.pid]
            if process.poll() is None and others:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(others), signal.SIGKILL)
                    box.counts["kills"] += 1
                    checkpoints.append(records.exists(box.out))

    done = box.train(plan, "--out", box.out, restarts=9, faults=[kill_some], seconds=600)
    box.require(done.status == 0, "the run is not restarted", done)
    box.resumed = min(sum(checkpoints), done.err.count("restarting all processes"))
    box.finish(plan)


# {kind of network: the rate in mbit/s, and the queue, of the link between two workers}
LINKS = {
    "slow": (10, 200, "burst 200kb latency 400ms"),
    "delay": (10, 20, "burst 70kb latency 10s"),
    "loss": (20, 200, "burst 70kb limit 80kb"),  # a queue so short that it drops packets
}


def network(rng, box):
    """Workers on a network that is slow, drops packets, or is cut for less time than a run waits: the bits are the
    same."""
    if not box.isolated or not shutil.which("tc"):
        raise Skipped("needs namespaces, ip and tc")
    plan, kind = box.plan(2), rng.choice((*LINKS, "cut", "many cuts"))
    delay = rng.uniform(0, box.usual_seconds(plan))
    cuts = [rng.uniform(0.01, 0.1) for _ in range(50)] if kind == "many cuts" else [rng.uniform(0.1, 3)]
    link = ""
    if kind in LINKS:
        least, most, queue = LINKS[kind]
        link = f"tc qdisc add dev lo root tbf rate {rng.randint(least, most)}mbit {queue}"

    def spoil(box, process, sent):
        if link:
            subprocess.run(link.split(), check=True)
            return
        time.sleep(delay)
        for cut in cuts:
            subprocess.run("ip link set lo down".split(), check=True)
            time.sleep(cut)
            subprocess.run("ip link set lo up".split(), check=True)
            time.sleep(cut)

    done = box.train(plan, "--out", box.out, faults=[spoil])
    box.require(done.status == 0, f"fails on a network with {link or kind}", done)
    box.finish(plan)


def two_runs(rng, box):
    """Two runs in one folder: one writes, the other is refused."""
    plan = box.plan()
    delay = rng.choice((0, rng.uniform(0, box.usual_seconds(plan))))
    (box.folder / "second").mkdir()
    other, ends = Box(rng, box.folder / "second", box.cache, box.isolated), []

    def start(box, process, sent):
        time.sleep(delay)
        try:
            ends.append(other.train(plan, "--out", box.out))
        except Exception as error:
            ends.append(error)

    ends.append(box.train(plan, "--out", box.out, faults=[start]))
    while len(ends) < 2:
        time.sleep(0.05)
    for end in ends:
        box.require(not isinstance(end, Exception), f"of two runs in one folder: {end}")
    statuses = sorted(end.status for end in ends)
    box.require(statuses == [0, 2], f"two runs in one folder end with {statuses}", ends[0])
    box.finish(plan)


def memory(rng, box):
    """Too little address space. MXNet's and NumPy's libraries may then abort or hang; what is left is complete."""
    plan, limits = box.plan(), {resource.RLIMIT_AS: int(2 ** rng.uniform(27, 33))}
    box.train(plan, "--out", box.out, limits=limits, seconds=60, may_crash=True)
    box.finish(plan)


# Disks and files

DATA = Path(os.environ.get("GLUON_MGPU_DATA") or "/nowhere") / "fashion-mnist"


def checkpoint_size(box, plan):
    return (box.undisturbed(plan) / "checkpoint.npz").stat().st_size


def disk(rng, box):
    """A disk that is full or out of inodes from the start or later, or becomes read-only; then it has space again."""
    plan = box.plan()
    needed = checkpoint_size(box, plan)
    kind = rng.choice(("small", "inodes", "filled later", "read-only", "read-only later"))
    size = int(rng.uniform(0.1, 3) * needed) if kind == "small" else 64 << 20
    box.mount(box.out, f"size={size}" + (f",nr_inodes={rng.randint(1, 4)}" if kind == "inodes" else ""))
    delay = rng.uniform(0, box.usual_seconds(plan))

    def spoil(box, process, sent):
        time.sleep(delay)
        while "read-only" in kind and not box.mount(box.out, "ro", again=True) and process.poll() is None:
            time.sleep(0.001)  # a file is being written
        if "filled" in kind:
            subprocess.run(["dd", "if=/dev/zero", f"of={box.out / 'ballast'}", "bs=4k"], capture_output=True)

    if kind == "read-only":
        box.mount(box.out, "ro", again=True)
    done = box.train(plan, "--out", box.out, faults=[spoil] if "later" in kind else [])
    if kind in ("inodes", "read-only") or size < needed:
        box.require(done.status == 1, f"succeeds on a disk that is {kind}", done)
    box.mount(box.out, "rw,size=64m,nr_inodes=1000", again=True)
    (box.out / "ballast").unlink(missing_ok=True)
    box.finish(plan)
    subprocess.run(["umount", str(box.out)], check=True)


def preloaded(box, **variables):
    """The environment of a run with preload.c."""
    library = box.cache / "preload.so"
    if not shutil.which("cc"):
        raise Skipped("needs a C compiler")
    if not library.exists():
        source = Path(__file__).with_name("preload.c")
        built = f"{library}.{box.folder.parent.name}"  # another scenario may be building it too
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
        os.replace(built, library)
    values = {f"TORTURE_{name.upper()}": str(value) for name, value in variables.items()}
    return {"LD_PRELOAD": str(library), **values}


def calls(rng, box):
    """Some calls that open, read, write, rename or lock the run's files fail with ENOSPC or EIO, or are slow."""
    plan = box.plan()
    for _ in range(rng.randint(1, 3)):
        failing = {
            "errno": rng.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)),
            "first": int(2 ** rng.uniform(0, 7)),
            "count": rng.choice((1, 2, 1000000)),
        }
        faults = rng.choice((failing, failing, {"delay": rng.choice((1000, 20000, 100000))}))
        done = box.go_on(plan, environment=preloaded(box, path="runs/run", **faults))
        if "delay" in faults:
            box.require(done.status == 0, "fails on a slow disk", done)
        box.check_checkpoint()
    box.finish(plan)


def clock(rng, box):
    """The time of day jumps forward and back every second."""
    seconds = rng.choice((-(10**9), -3600, -1, 3600, 10**8, 10**9))
    plan = box.plan()
    done = box.train(plan, "--out", box.out, environment=preloaded(box, jump=seconds))
    box.require(done.status == 0, "fails if the clock jumps", done)
    box.finish(plan)


def file_size(rng, box):
    """A limit on the size of files, which is reached at some point of a file that is being written."""
    plan = box.plan()
    needed = checkpoint_size(box, plan)
    most = int(rng.uniform(4000, 2 * needed))  # standard error is a file too, but smaller
    done = box.train(plan, "--out", box.out, limits={resource.RLIMIT_FSIZE: most})
    box.require(done.status == (1 if most < needed else 0), "wrong status", done)
    box.finish(plan)


def unreadable(path, content, *_):
    path.write_bytes(content)
    path.chmod(0)


def from_another_version(path, content, place, other):
    """A checkpoint in a different format, or a different version or name in config.json and metrics.jsonl."""
    path.write_bytes(content)
    if path.suffix == ".npz":
        arrays, facts = checkpoint.load(path)
        checkpoint.save(path, arrays, {**facts, "format": facts["format"] + (-1) ** place})
    elif path.suffix in (".json", ".jsonl"):
        path.write_bytes(content.replace(b'"version": "', b'"version": "9').replace(b'"epoch"', b'"number"'))


# {kind: function(path, its content, a place in the content, another file)}
DAMAGES = {
    "truncated": lambda path, content, place, other: path.write_bytes(content[: place // 2]),
    "flipped": lambda path, content, place, other: path.write_bytes(
        content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
    ),
    "inserted": lambda path, content, place, other: path.write_bytes(content[:place] + b"\0" + content[place:]),
    "zeros": lambda path, content, place, other: path.write_bytes(content[:place] + bytes(len(content) - place)),
    "swapped": lambda path, content, place, other: shutil.copy(other, path),
    "empty": lambda path, *_: path.touch(),
    "folder": lambda path, *_: path.mkdir(),
    "FIFO": lambda path, *_: os.mkfifo(path),
    "loop": lambda path, *_: path.symlink_to(path.name),
    "socket": lambda path, *_: os.mknod(path, stat.S_IFSOCK | 0o644),
    "missing": lambda path, *_: None,
    "unreadable": unreadable,
    "version": from_another_version,
}


def damage(rng, path, other, kinds=tuple(DAMAGES)):
    """Damage a file; returns how."""
    content, kind = path.read_bytes(), rng.choice(kinds)
    command = [sys.executable, "-c", "import gluon_mgpu"]
    if kind == "unreadable" and subprocess.run(command, cwd=ROOT, preexec_fn=be_ordinary).returncode:
        raise Skipped("root may read this project only as root")
    path.unlink()
    DAMAGES[kind](path, content, rng.randrange(len(content)), other)
    return kind


def contents(folder):
    """{name: (kind, content)} of a folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        regular = path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)
        found[path.name] = (path.lstat().st_mode, path.read_bytes() if regular else None)
    return found


def damaged(rng, box):
    """A damaged file of a run: it is refused and everything is left unchanged, or the damage does not matter."""
    plan = box.plan()
    shutil.copytree(box.undisturbed(plan), box.out)
    name = rng.choice(("checkpoint.npz", "checkpoint.npz", "config.json", "metrics.jsonl", "curves.png"))
    kind = damage(rng, box.out / name, box.undisturbed(box.plan()) / name)
    before, read, ordinary = contents(box.out), name == "checkpoint.npz", kind == "unreadable"
    if rng.random() < 0.3:
        done = box.run([sys.executable, "-m", "gluon_mgpu", "evaluate", box.out], ordinary=ordinary)
        box.require(contents(box.out) == before, f"{name}: {kind}: evaluate changes the files", done)
    else:
        done = box.train({}, "--resume", box.out, ordinary=ordinary)
        if done.status == 0 and not (read and kind == "swapped"):
            box.finish(plan)
        elif done.status:
            box.require(contents(box.out) == before, f"{name}: {kind}: changes the files", done)
    if read and kind != "swapped":
        box.require(done.status in (1, 2), f"{name}: {kind}: is accepted", done)


def damaged_data(rng, box):
    """A damaged file of a data set is refused."""
    if not DATA.is_dir():
        raise Skipped("GLUON_MGPU_DATA has no fashion-mnist")
    data = box.folder / "runs" / "data"
    data.mkdir()
    for path in DATA.iterdir():
        shutil.copy(path, data)
    chosen = rng.choice(sorted(data.iterdir()))
    other = rng.choice([path for path in sorted(data.iterdir()) if path != chosen])
    kind = damage(rng, chosen, other, [kind for kind in DAMAGES if kind != "version"])
    before = contents(data)
    plan = {"dataset": "fashion-mnist", "limit": 200, "epochs": 1}
    done = box.train(plan, "--data-dir", data, ordinary=kind == "unreadable")
    box.require(done.status in (1, 2), f"{chosen.name}: {kind}: is accepted", done)
    box.require(contents(data) == before, f"{chosen.name}: {kind}: changes the files", done)


# Starts

NUMBERS = ("1", "2", "3", "0", "-1", "", " ", "x", "1.5", "true", "9" * 20, "٣", "1;2", "x" * 5000, "\udcff")
# Variables that must neither stop a run nor change its parameters, with their values. RUNS stands for a folder.
HARMLESS = """
LANG LC_ALL LC_CTYPE LC_NUMERIC LANGUAGE: C POSIX C.UTF-8 en_US.UTF-8 de_DE@euro nonsense ''
HOME TMPDIR XDG_CACHE_HOME XDG_CONFIG_HOME MXNET_HOME MPLCONFIGDIR: /nowhere /dev/null RUNS/é雪 ''
TERM TZ COLUMNS: dumb xterm-256color Asia/Tokyo 0 100000 nonsense ''
NO_COLOR TQDM_DISABLE PYTHONDEVMODE PYTHONFAULTHANDLER PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONNOUSERSITE: 1
MALLOC_ARENA_MAX MALLOC_CHECK_ MALLOC_PERTURB_: 0 1 8 165 x
MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ MALLOC_TOP_PAD_: 0 -1 4096 99999999 x
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
# Variables that may choose other instructions, libraries or thread counts, or that must be refused if invalid.
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
    """Up to 8 harmless environment variables for any scenario's commands; Python starts with them."""
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
COMMANDS = {"evaluate": "RUN", "convert": "--to=gluon RUN net", "launch": "-- true", "run": "program.py"}
COMMANDS |= {"exercise start": "allreduce", "exercise check": "answer.py"}
COMMANDS |= dict.fromkeys(("train", "doctor"), "")
COMMANDS |= dict.fromkeys(("exercise list", "kernel install", "kernel uninstall"), "")
SMALL = {"train": "--dataset=synthetic --epochs=1 --limit=200 --batch-size=50"}  # unless these options are drawn


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


SCENARIOS = {  # {kind: (function(rng, box), share of the time)}
    **{"signals": (signals, 3), "workers": (workers, 3), "horovod": (horovod, 3), "restarts": (restarts, 2)},
    **{"network": (network, 1), "two runs": (two_runs, 1), "memory": (memory, 1)},
    **{"disk": (disk, 2), "calls": (calls, 2), "clock": (clock, 0.5), "file size": (file_size, 0.5)},
    **{"damaged": (damaged, 3), "damaged data": (damaged_data, 1)},
    **{"environment": (environment, 3), "command line": (command_line, 3)},
}
