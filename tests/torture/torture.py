"""Tortures training runs with signals, full disks and damaged files, and fuzzes every file reader.

Runs are drawn from the table in tests/test_features.py. Each scenario runs in a process of its own and, for root, with
its own mounts, network and process ids. See docs/reliability.md.

    make torture MINUTES=30 SEED=1
    python tests/torture/torture.py --scenario signals --seed 123      # repeats one scenario
    python tests/torture/torture.py --reader images --seconds 600      # fuzzes one reader for longer
"""

import argparse
import ctypes
import gzip
import hashlib
import io
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import gluon_mgpu  # noqa: E402

gluon_mgpu.configure(3)

import test_features as table  # noqa: E402
from test_features import checkpoint, datasets, evaluate, mx, np  # noqa: E402

TRAIN = [sys.executable, ROOT / "scripts/train.py"]
MPIEXEC = Path(sys.executable).with_name("mpiexec")
FILES = {"checkpoint.npz", "config.json", "curves.png", "metrics.jsonl"}  # the files of a finished run
MARK = "TORTURE_BOX"  # environment variable of every process of a scenario
UNSHARE = "unshare --mount --pid --net --ipc --fork --kill-child --mount-proc".split()
SECONDS = 240  # limit for one command, on a busy machine
SECONDS_TO_END = 15  # for the other processes, after the command has ended
SECONDS_PER_SCENARIO = 900
COUNTS = "counts:"  # begins a line of a scenario's output
# compared: with uninterrupted runs. resumed: how often these were resumed from a checkpoint after SIGKILL.
COLUMNS = ("runs", "violations", "commands", "signals", "kills", "compared", "resumed")
CRASH = re.compile(
    "Traceback|core dumped|terminate called|Assertion|Check failed|Segmentation fault|Fatal Python|Exception ignored|"
    "Stack trace|stack smashing|double free|corrupted|SIG(SEGV|ABRT|BUS|FPE|ILL)|Bus error|Illegal instruction"
)

Finished = namedtuple("Finished", "status out err sent")


class Box:
    """The folders in which one scenario runs commands, and the promises that every command must keep.

    folder: the scenario's own folder. cache: holds data and uninterrupted runs."""

    def __init__(self, rng, folder, cache):
        self.rng, self.folder, self.cache = rng, Path(folder), Path(cache)
        (self.folder / "runs").mkdir()
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
            **{"LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(self.cache / "matplotlib")},
            **{"HOME": str(self.folder), "TMPDIR": str(self.folder), MARK: str(self.folder)},
        }
        self.out = self.folder / "runs" / "run"
        self.log, self.counts = [], Counter()  # log: the commands so far
        self.was_killed, self.resumed = False, 0  # whether SIGKILL ended the latest command; resumes after that

    def train(self, plan, *words, **options):
        """Run train.py with a plan's settings, and further words."""
        values = {n: ",".join(map(str, v)) if isinstance(v, tuple) else v for n, v in plan.items() if n != "workers"}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        mpi = [MPIEXEC, "-n", plan["workers"]] if plan.get("kvstore") == "mpi" else []
        return self.run([*mpi, *TRAIN, *flags, *words], **options)

    def go_on(self, plan, **options):
        """Start the plan's run in the folder `out`, or resume it."""
        was_killed, self.was_killed = self.was_killed, False
        if not os.path.lexists(self.out / "checkpoint.npz"):
            return self.train(plan, "--out", self.out, **options)
        self.resumed += was_killed
        names = ("workers", "kvstore", "data_dir") + ("impl",) * plan["impl"].endswith(".py")
        kept = {name: plan[name] for name in names if name in plan}
        return self.train(kept, "--resume", self.out, **options)

    def run(self, command, faults=(), seconds=SECONDS):
        """Run a command until it ends, and check the promises of every command. faults: functions fault(box, process,
        sent), each called in a thread."""
        command, sent = [str(word) for word in command], []
        self.log.append(shlex.join(command)[:2000])
        self.counts["commands"] += 1
        with open(self.folder / "out", "w+b") as out, open(self.folder / "err", "w+b") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "start_new_session": True}
            options = {"env": self.environment, "cwd": self.folder, "preexec_fn": prepare_child, **streams}
            process = subprocess.Popen(command, **options)
            pool = ThreadPoolExecutor(1 + len(faults))
            disturbing = [pool.submit(fault, self, process, sent) for fault in faults]
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                status = process.poll()
                ended, _ = wait(disturbing, SECONDS_TO_END)
                until = time.monotonic() + SECONDS_TO_END
                while (left := processes(self.folder)) and time.monotonic() < until:
                    time.sleep(0.05)
            finally:
                kill(self.folder)
                process.wait()
        done = Finished(status, *((self.folder / name).read_text(errors="replace") for name in ("out", "err")), sent)
        self.counts["signals"] += len(sent)
        self.counts["kills"] += sent.count(signal.SIGKILL)
        self.was_killed = signal.SIGKILL in sent and status != 0
        for fault in ended:
            fault.result()  # raises what the fault raised
        self._check_end(done, left, "mpiexec" in command[0])
        return done

    def require(self, condition, line, done=None):
        if condition:
            return
        if done:
            line += f"\n  status {done.status}, sent {done.sent}, standard error:\n{done.err[-3000:]}"
        raise AssertionError(line)

    def _check_end(self, done, left, by_mpiexec):
        self.require(done.status is not None, "did not end in time", done)
        self.require(not left, f"processes are left: {left}", done)
        expected = {0, 1, 2, 130} | {-number for number in done.sent}
        # mpiexec has statuses of its own for a worker that a signal has ended
        self.require(done.status in expected or (by_mpiexec and done.sent), "unexpected exit status", done)
        errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
        self.require(len(errors) <= 1, f"{len(errors)} error lines", done)
        self.require(errors or done.sent or done.status not in (1, 2), "failed without an error line", done)
        crash = CRASH.search(done.err + done.out)
        if crash and done.sent and f'File "{ROOT}/gluon_mgpu' not in done.err:
            crash = None  # the signal arrived while Python itself was starting
        self.require(not crash, f"shows {crash and crash[0]!r}", done)

    def finish(self, plan):
        """Without faults, the run in the folder `out` can be finished, and has the bits of an uninterrupted run."""
        done = self.go_on(plan)
        self.require(done.status == 0, "the run cannot be finished", done)
        self.require(set(os.listdir(self.out)) == FILES, f"has the files {sorted(os.listdir(self.out))}", done)
        table.assert_same_bits(self.out, self.uninterrupted(plan)[0])
        self.counts["compared"] += 1
        self.counts["resumed"] += self.resumed

    def plan(self):
        """Draw the settings of a run. There are few plans, so that uninterrupted runs are shared."""
        rng = random.Random(self.rng.randrange(40))
        # only the tests' process registers the network with dropout
        rows = [row for row in table.ROWS if row.lesson != "dropout" and row[:2] != ("resnet18", "synthetic")]
        row = rng.choice([row for row in rows if row.train == "yes"])
        plan = row.settings(self.cache / "data")
        plan |= {"gpus": rng.choice((1, 2, 2, 3)), "seed": rng.randrange(3), "epochs": rng.choice((5, 20, 40))}
        if row.workers in ("yes", "about") and rng.random() < 0.4 and MPIEXEC.exists():
            plan |= {"kvstore": "mpi", "workers": rng.choice((2, 2, 3)), "gpus": 1}
        if "kvstore" in plan or plan["gpus"] != 2:
            plan.pop("shares", None)
        plan |= {"model": "resnet18", "epochs": 3} if row.lesson == "resnet18" else {}
        return plan | ({"schedule": "cosine", "warmup_epochs": 0.5} if rng.random() < 0.3 else {})

    def uninterrupted(self, plan):
        """(folder, seconds) of an uninterrupted run of a plan, which is kept in the cache."""
        name = hashlib.sha256(repr(sorted(plan.items())).encode()).hexdigest()[:16]
        folder = self.cache / name
        if not folder.exists():
            folder.mkdir()
            began = time.monotonic()
            done = self.train(plan, "--out", folder / "run")
            self.require(done.status == 0, "an uninterrupted run fails", done)
            (folder / "seconds").write_text(str(time.monotonic() - began))
        return folder / "run", float((folder / "seconds").read_text())


def processes(folder):
    """Process ids of the commands of boxes whose folder begins with `folder`."""
    mark, found = f"{MARK}={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (process / "stat").read_bytes().rsplit(b")", 1)[1].split()[0]
            if int(process.name) != os.getpid() and mark in (process / "environ").read_bytes() and state not in b"ZX":
                found.append(int(process.name))
    return sorted(found)


def kill(folder):
    while left := processes(folder):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def prepare_child():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the child ends with this process
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Send:
    """A fault: sends a signal to a process of the command, at a moment drawn when it is created."""

    def __init__(self, rng, seconds, which=None):
        self.which = which or signal.Signals[f"SIG{rng.choice('KILL KILL TERM INT STOP HUP'.split())}"]
        self.moment = rng.choice(("time", "epoch", "saving"))
        self.delay = rng.uniform(0, seconds * 1.1 if self.moment == "time" else seconds / 4)
        self.stopped, self.draw = rng.uniform(0.05, 2), rng.random()

    def __call__(self, box, process, sent):
        if not self._wait(box, process):
            return
        with suppress(ProcessLookupError, FileNotFoundError, IndexError):
            candidates = processes(box.folder)
            target = candidates[int(self.draw * len(candidates))]
            os.kill(target, self.which)
            sent.append(self.which)
            if self.which == signal.SIGSTOP:
                time.sleep(self.stopped)
                os.kill(target, signal.SIGCONT)

    def _wait(self, box, process):
        """Wait for the moment. Returns False if the command ends first."""
        while self.moment != "time" and process.poll() is None:
            if self.moment == "saving" and any((box.folder / "runs").glob("*/.*.part")):
                return True
            if self.moment == "epoch" and b"epoch 1" in (box.folder / "out").read_bytes():
                break
            time.sleep(0.0005 if self.moment == "saving" else 0.01)
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.delay)
        return process.poll() is None


def signals(rng, box):
    """Up to 3 signals for any process of a run, up to 3 times."""
    plan = box.plan()
    _, seconds = box.uninterrupted(plan)
    for _ in range(rng.randint(1, 3)):
        faults = [Send(rng, seconds) for _ in range(rng.randint(1, 3))]
        done = box.go_on(plan, faults=faults)
        if (box.out / "checkpoint.npz").exists():
            checkpoint.load(box.out / "checkpoint.npz")  # complete, or absent
        box.require(done.status == 0 or {*done.sent} != {signal.SIGSTOP}, "a short stop ends the run", done)
    box.finish(plan)


def mount(folder, *options):
    return subprocess.run(["mount", *options, str(folder)], capture_output=True).returncode == 0


def disk(rng, box):
    """A disk that is full from the start or later, or becomes read-only; then it has space again."""
    plan, kind = box.plan(), rng.choice(("full", "filled later", "read-only later"))
    expected, seconds = box.uninterrupted(plan)
    needed, delay = (expected / "checkpoint.npz").stat().st_size, rng.uniform(0, seconds)
    size = int(rng.uniform(0.1, 3) * needed) if kind == "full" else 8 * needed + (1 << 20)

    def spoil(box, process, sent):
        time.sleep(delay)
        while kind == "read-only later" and not mount(box.out, "-o", "remount,ro") and process.poll() is None:
            time.sleep(0.001)  # a file is being written
        if kind == "filled later":
            subprocess.run(["dd", "if=/dev/zero", f"of={box.out / 'ballast'}", "bs=4k"], capture_output=True)

    box.out.mkdir()
    mount(box.out, "-t", "tmpfs", "-o", f"size={size}", "none")
    done = box.train(plan, "--out", box.out, faults=[spoil])
    box.require(done.status == 1 or size > needed, "succeeds on a full disk", done)
    mount(box.out, "-o", f"remount,rw,size={64 * needed + (64 << 20)}")
    (box.out / "ballast").unlink(missing_ok=True)
    box.finish(plan)


# {kind: function(path, its content, a place in the content)}
DAMAGES = {
    "truncated": lambda path, content, place: path.write_bytes(content[: place // 2]),
    "flipped": lambda path, content, i: path.write_bytes(content[:i] + bytes([content[i] ^ 4]) + content[i + 1 :]),
    "zeros": lambda path, content, place: path.write_bytes(content[:place] + bytes(len(content) - place)),
    "folder": lambda path, *_: path.mkdir(),
    "FIFO": lambda path, *_: os.mkfifo(path),
    "loop": lambda path, *_: path.symlink_to(path.name),
    "missing": lambda path, *_: None,
}


def damaged(rng, box):
    """A damaged file of a run: it is refused and everything is left unchanged, or it is not read."""
    plan, kind, name = box.plan(), rng.choice(list(DAMAGES)), rng.choice(("checkpoint.npz", *sorted(FILES)))
    shutil.copytree(box.uninterrupted(plan)[0], box.out)
    path, act = box.out / name, rng.choice(("resume", "evaluate", "convert"))
    content = path.read_bytes()
    path.unlink()
    DAMAGES[kind](path, content, rng.randrange(len(content)))
    before = {path.name: path.lstat().st_mtime_ns for path in box.out.iterdir()}
    words = [f"--data-dir={plan['data_dir']}"] if "data_dir" in plan else []
    words += [f"--impl={plan['impl']}"] if ".py" in plan["impl"] else []
    more = {"resume": ["--resume", box.out], "evaluate": [box.out, "--device=cpu"]}
    more["convert"] = [box.out, "--to=gluon", box.folder / "runs" / "net"]
    if act == "resume" and name != "checkpoint.npz":
        done = box.go_on(plan)
    else:
        script = ROOT / f"scripts/{'train' if act == 'resume' else act}.py"
        done = box.run([sys.executable, script, *more[act], *words])
    refused = act == "resume" and kind in ("folder", "FIFO")  # it cannot be written
    expected = {1, 2} if name == "checkpoint.npz" else {int(refused)}
    box.require(done.status in expected, f"{name}: {kind}: {act}", done)
    unchanged = {path.name: path.lstat().st_mtime_ns for path in box.out.iterdir()} == before
    box.require(unchanged or done.status == 0, f"{name}: {kind}: {act} changes the files", done)


# Fuzzing: each reader gets random, mutated and hostile bytes. It may raise Error, within limits on time and memory.

READER_BYTES, READER_SECONDS = 1 << 28, 20
BOMB = 1 << 29  # bytes to which a small hostile file decompresses
VALUES = [None, True, -1, 10**400, 1e400, math.nan, "", "x" * 999, "\x1b[31m", 5 * 10**9, "cpu(99999999999)", [[]], {}]
TEXTS = (b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**4, b"NaN", b'"\\ud800"', b"\xff\xfe", b"")
SIZES = (2**31, 2**40, 2**62, 2**63, 10**30, -1, 0, "x", None)


def mutated(rng, content):
    """Change some bytes: overwrite, insert, delete or repeat them."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        place, size = rng.randrange(len(content) + 1), rng.choice((1, 1, 2, 4, 16, 256))
        new = rng.choice((rng.randbytes(size), b"\0" * size, b"\xff" * size, bytes(content[place : place + size]), b""))
        content[place : place + rng.choice((0, len(new), size))] = new
    return bytes(content)


def text(rng, value):
    """JSON with a changed, missing or hostile value somewhere."""

    def changed(value):
        if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
            return rng.choice(VALUES)
        if isinstance(value, list):
            i = rng.randrange(len(value))
            return [*value[:i], changed(value[i]), *value[i + 1 :]]
        name = rng.choice(list(value))
        return {k: changed(v) if k == name else v for k, v in value.items() if k != name or rng.random() < 0.9}

    written = json.dumps(changed(value) if rng.random() < 0.8 else value).encode()
    return rng.choice((written, written, written, mutated(rng, written), rng.choice(TEXTS)))


def file_of(write):
    write(file := io.BytesIO())
    return file.getvalue()


def archive(rng, arrays, **other):
    """A .npz file with hostile headers, names, bytes or compression. other: {name: content of a .npy file}."""
    file = io.BytesIO()
    members = {f"{name}.npy": file_of(lambda f, a=array: np.save(f, a)) for name, array in arrays.items()} | other
    name, change = rng.choice(list(members)), rng.choice(("header", "bytes", "missing", "file", "none"))
    if change == "header":
        shape = rng.choice(((rng.choice(SIZES),), (2**31, rng.choice(SIZES)), (2,) * 100, rng.choice(SIZES)))
        kind = rng.choice(("<f4", "|O", "|S0", "<U1000000000", "<M8[ns]", "x", [("a", "<f4", (2**31,))]))
        header = repr({"descr": kind, "fortran_order": rng.random() < 0.5, "shape": shape}).encode()
        header = rng.choice((header, header, mutated(rng, header), b"(" * 5000, b"-" * 9000 + b"1"))
        members[name] = b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + bytes(64)
    elif change == "bytes":
        members[name] = mutated(rng, members[name])
    elif change == "missing":
        del members[name]
    method = rng.choice((zipfile.ZIP_STORED,) * 3 + (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    if rng.random() < 0.01:
        method, members["train_images.npy"] = zipfile.ZIP_DEFLATED, bytes(BOMB >> 1)
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as packed:
        for path, content in members.items():
            packed.writestr(zipfile.ZipInfo(path), content, method)
    return mutated(rng, file.getvalue()) if change == "file" else file.getvalue()


def make_checkpoint(rng):
    config = table.Config(limit=200, seed=1, shares=(1, 2)).recorded()
    config |= {"devices": ["cpu(0)"], "workers": 1, "threads": 1, "image_shape": [1, 28, 28], "running_stats": True}
    config |= {"image_dtype": "float32", "image_range": [0, 1], "classes": 10, "version": "0", "data": "synthetic"}
    epoch = dict.fromkeys(("epoch train_seconds samples_per_second train_loss test_accuracy learning_rate").split(), 1)
    facts = {"format": 1, "config": config, "history": [epoch], "steps": 3, "loss_sum": 1.5, "seconds": 0.5}
    if rng.random() < 0.5:  # nothing is wrong except one value
        config[rng.choice(list(config))] = rng.choice(VALUES)
    encoded = json.dumps(facts).encode() if rng.random() < 0.3 else text(rng, facts)
    facts = file_of(lambda f: np.save(f, np.frombuffer(encoded, np.uint8)))
    content = archive(rng, {"W1": np.ones((2, 3), np.float32), "b1": np.ones(2)}, **{"facts.json.npy": facts})
    return content + hashlib.sha256(content).hexdigest().encode() if rng.random() < 0.95 else content


def read_checkpoint(folder):
    """What `evaluate` and `train --resume` do with the facts of a checkpoint."""
    run = evaluate.read(folder)
    assert "\x1b" not in str(run.position)
    run.recorded.resumed({}).learning_rate(run.position.steps, 10)
    evaluate.scaled(evaluate.Trained(run, run.recorded, None, ""), np.zeros((1, *run.details["image_shape"][:0])))
    run.folder = None
    run.begin(run.recorded, {"devices": ["cpu(0)"], "workers": 2, "threads": 1, "running_stats": True}, {})


def make_own_data(rng):
    arrays = {f"{part}_images": np.zeros((4, 3, 2, 2), np.uint8) for part in ("train", "test")}
    return archive(rng, arrays | {f"{part}_labels": np.arange(4) for part in ("train", "test")})


def make_idx(rng):
    if rng.random() < 0.01:
        return gzip.compress(bytes(1 << 20), 1) * (BOMB >> 20)
    whole = struct.pack(">IIII", 2051, 10000, 28, 28) + rng.randbytes(784)
    packed = gzip.compress(whole, mtime=0)
    return rng.choice((whole, mutated(rng, whole), mutated(rng, packed), packed[: rng.randrange(len(packed))]))


def read_idx(folder):
    for file in datasets.SHA256["mnist"]:
        shutil.copy(folder / "idx", folder / file)
    datasets.load("own", folder)


def make_image(rng):
    width, kind = rng.choice((1, 28, 300)), rng.choice(evaluate.FORMATS)
    image = table.Image.frombytes("L", (width, 28), rng.randbytes(28 * width)).convert(rng.choice(("L", "RGB")))
    return mutated(rng, file_of(lambda file: image.save(file, kind)))


def make_network(rng):
    """A graph and its parameters, one after the other."""
    with mx.name.NameManager():  # the same names for each input
        x = mx.sym.Activation(mx.sym.Convolution(mx.sym.var("data"), kernel=(2, 2), num_filter=2), act_type="relu")
        x = mx.sym.FullyConnected(mx.sym.flatten(x), num_hidden=3)
    graph = json.loads(x.tojson())
    shapes = zip(x.list_arguments(), x.infer_shape(data=(1, 1, 4, 4))[0])
    with tempfile.NamedTemporaryFile() as file:
        mx.nd.save(file.name, {f"arg:{name}": mx.nd.ones(shape) for name, shape in shapes if name != "data"})
        params = Path(file.name).read_bytes()
    if rng.random() < 0.5:
        return json.dumps([json.dumps(graph), mutated(rng, params).decode("latin-1")]).encode()
    return json.dumps([text(rng, graph).decode("latin-1"), params.decode("latin-1")]).encode()


def read_network(folder):
    paths = folder / "net-symbol.json", folder / "net-0000.params"
    for path, part in zip(paths, json.loads((folder / "both").read_bytes())):
        path.write_bytes(part.encode("latin-1"))
    table.convert.from_files(*paths, (1, 4, 4))


READERS = {  # {name: (file, make(rng) -> its content, read(folder))}
    "checkpoint": ("checkpoint.npz", make_checkpoint, read_checkpoint),
    "own data": ("data.npz", make_own_data, lambda folder: datasets.load("own", folder)),
    "idx": ("idx", make_idx, read_idx),
    "images": ("image.png", make_image, lambda folder: evaluate.read_image(folder / "image.png", (3, 8, 8))),
    "network": ("both", make_network, read_network),
}


def fuzz(reader, seconds, seed, first=0):
    """Give a reader inputs for some seconds. Returns the exit status."""
    file, make, read = READERS[reader]
    most = 4 << 30 if reader == "network" else READER_BYTES  # without enough memory, MXNet may crash
    until, n, before = time.monotonic() + seconds, first, resource.getrlimit(resource.RLIMIT_AS)
    while time.monotonic() < until:
        content = make(random.Random(f"{reader} {seed} {n}"))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            (Path(folder) / file).write_bytes(content)
            again = f"  again: python tests/torture/torture.py --reader '{reader}' --seed {seed} --input {n}"
            if MARK in os.environ:  # for a reader that crashes
                (Path(folder).parent / "input").write_text(again)
            resource.setrlimit(resource.RLIMIT_AS, (used + most, before[1]))
            signal.alarm(READER_SECONDS)
            try:
                with suppress(datasets.Error):
                    read(Path(folder))
            except BaseException as error:
                last = "".join(traceback.format_tb(error.__traceback__)[-3:])
                print(f"error: {error!r} {last}\n  {content[:200]!r}\n{again}", file=sys.stderr)
                return 1
            finally:
                signal.alarm(0)
                resource.setrlimit(resource.RLIMIT_AS, before)
        n += 1
    print(f"{reader}: {n - first} inputs")
    return 0


def readers(rng, box):
    """All readers in turn, for a few seconds each."""
    for reader in READERS:
        done = box.run(
            [sys.executable, __file__, f"--reader={reader}", "--seconds=4", f"--seed={rng.randrange(10**6)}"]
        )
        box.require(done.status == 0, f"{reader}: {(box.folder / 'input').read_text()}", done)


# {kind: (function(rng, box), how often)}
SCENARIOS = {"signals": (signals, 6), "disk": (disk, 3), "damaged": (damaged, 3), "readers": (readers, 1)}


def one(kind, seed, folder, cache):
    """Run one scenario. Returns the exit status."""
    box = Box(random.Random(seed), folder, cache)
    try:
        SCENARIOS[kind][0](box.rng, box)
    except (AssertionError, datasets.Error) as violation:  # Error: of a checkpoint that is not complete
        print(f"violation: {violation}\n  commands:", *box.log, sep="\n    ")
        return 1
    finally:
        kill(box.folder)
        print(COUNTS, json.dumps(box.counts))
    return 0


def isolated(kind, seed, cache, prefix):
    """Run one scenario in its own process, folder and, with a prefix, namespaces. Returns (status, output)."""
    with tempfile.TemporaryDirectory(prefix="box-", dir=cache, ignore_cleanup_errors=True) as folder:
        words = [f"--scenario={kind}", f"--seed={seed}", f"--cache={cache}", f"--folder={folder}"]
        command = [*prefix, sys.executable, __file__, *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        process = subprocess.Popen(command, preexec_fn=prepare_child, **streams)
        try:
            out, _ = process.communicate(timeout=SECONDS_PER_SCENARIO)
        except subprocess.TimeoutExpired:
            process.kill()
            out = f"violation: did not end in time\n{process.communicate()[0]}"
        finally:
            kill(folder)  # without namespaces, processes of a scenario that was killed may be left
    return process.returncode, out


def torture(minutes, seed, kinds, cache, prefix):
    """Run scenarios until the time is up. Returns the number of violations."""
    rng, until, counts = random.Random(seed), time.monotonic() + 60 * minutes, Counter()
    try:
        while time.monotonic() < until:
            [kind] = rng.choices(kinds, [SCENARIOS[kind][1] for kind in kinds])
            number = rng.randrange(10**6)
            status, out = isolated(kind, number, cache, prefix)
            found = re.findall(f"^{COUNTS} (.*)$", out, re.MULTILINE)
            for name, n in json.loads(found[-1] if found else "{}").items():
                counts[kind, name] += n
            counts[kind, "runs"] += 1
            if status:
                counts[kind, "violations"] += 1
                again = f"python tests/torture/torture.py --scenario '{kind}' --seed {number}"
                print(f"{out}\n  again: {again}\n", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    row = "{:10}" + " {:>10}" * len(COLUMNS)
    print(row.format("scenario", *COLUMNS))
    for kind in kinds:
        print(row.format(kind, *(counts[kind, column] for column in COLUMNS)))
    return sum(n for (_, name), n in counts.items() if name == "violations")


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # commands may hold any bytes
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="kinds of scenarios")
    parser.add_argument("--scenario", choices=SCENARIOS, help="run only one scenario, with --seed")
    parser.add_argument("--reader", choices=READERS, help="fuzz only one reader, for --seconds")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--input", type=int, default=0, help="with --reader: the first input's number")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.reader:
        sys.exit(fuzz(options.reader, options.seconds, options.seed, options.input))
    if options.folder:
        sys.exit(one(options.scenario, options.seed, options.folder, options.cache))
    prefix = [*UNSHARE, "sh", "-c", 'ip link set lo up && mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        print("needs root for namespaces: no disk is filled")
        prefix, options.only = [], [kind for kind in options.only if kind != "disk"]
    with tempfile.TemporaryDirectory(prefix="torture-") as cache:
        (Path(cache) / "data").mkdir()
        table.Runs(Path(cache) / "data")
        if options.scenario:
            status, out = isolated(options.scenario, options.seed, cache, prefix)
            sys.exit(print(out) or status)
        sys.exit(1 if torture(options.minutes, options.seed, options.only, cache, prefix) else 0)


if __name__ == "__main__":
    main()
