"""Tortures training runs with random faults, and fuzzes every file reader. See docs/parity.md.

Runs are drawn from the table in tests/test_features.py. A signal reaches any of a run's processes at any time, or files
can suddenly no longer grow, as on a full disk. Then the run must be resumable, with the bits of an uninterrupted run.

    make torture MINUTES=30 SEED=1
    python tests/torture/torture.py --seed 123 --minutes 0             # one scenario, again
    python tests/torture/torture.py --reader images --inputs 100000    # fuzzes one reader for longer
"""

import argparse
import hashlib
import io
import json
import math
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

import gluon_mgpu  # noqa: E402

gluon_mgpu.configure(3)

import runs  # noqa: E402
import test_features as table  # noqa: E402
from test_features import checkpoint, datasets, evaluate, mx, np  # noqa: E402

FILES = {"checkpoint.npz", "config.json", "curves.png", "metrics.jsonl"}  # the files of a finished run
MARK = "TORTURE_BOX"  # environment variable of every process of a scenario
SECONDS = 600  # limit for one command, on a busy machine
SECONDS_TO_END = 60  # for the other processes, after the command has ended
FULL = -1  # a fault, instead of a signal: files cannot grow beyond a size, as on a full disk
FAULTS = (*(signal.Signals[f"SIG{name}"] for name in "KILL KILL TERM INT HUP".split()), FULL)
CRASH = re.compile(
    "Traceback|core dumped|terminate called|Assertion|Check failed|Segmentation fault|Fatal Python|Exception ignored|"
    "Stack trace|stack smashing|double free|corrupted|SIG(SEGV|ABRT|BUS|FPE|ILL)|Bus error|Illegal instruction"
)


class Box:
    """The folder in which one run is tortured, and the promises that every command must keep.

    data: a folder with the data of `table.Runs`. whole: {settings: (folder, seconds)} of uninterrupted runs, which
    scenarios share."""

    def __init__(self, rng, folder, data, whole):
        self.rng, self.folder, self.data, self.whole = rng, Path(folder), Path(data), whole
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
            **{"LANG": "C.UTF-8", "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(self.data / "matplotlib")},
            **{"HOME": str(self.folder), "TMPDIR": str(self.folder), MARK: str(self.folder)},
        }
        self.out = self.folder / "run"

    def train(self, plan, *words, fault=None):
        """Run train.py with a plan's settings and further words, and check the promises. Returns its status.

        fault: a function fault(box, process)."""
        values = {n: ",".join(map(str, v)) if isinstance(v, tuple) else v for n, v in plan.items() if n != "workers"}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
        mpi = [runs.MPIEXEC, "-n", str(plan["workers"])] if plan.get("kvstore") == "mpi" else []
        with open(self.folder / "out", "w+b") as out, open(self.folder / "err", "w+b") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            options = {"env": self.environment, "cwd": self.folder, "start_new_session": True, **streams}
            process = subprocess.Popen([*mpi, *runs.TRAIN, *flags, *map(str, words)], **options)
            try:
                sent = fault and fault(self, process)
                status = process.wait(SECONDS)
                runs.wait(lambda: not processes(self.folder), SECONDS_TO_END)
            finally:
                for pid in processes(self.folder):
                    os.kill(pid, signal.SIGKILL)
                process.wait()
        printed, error = ((self.folder / name).read_text(errors="replace") for name in ("out", "err"))
        # mpiexec has statuses of its own for a worker that a signal has ended
        assert status in (0, 1, 2, 130) or sent and (mpi or status == -sent), f"unexpected exit status {status}"
        errors = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(errors) <= 1 and (errors or sent or status not in (1, 2)), f"{len(errors)} error lines"
        crash = CRASH.search(error + printed)
        if crash and sent and f'File "{ROOT}/gluon_mgpu' not in error:
            crash = None  # the signal arrived while Python itself was starting
        assert not crash, f"shows {crash[0]!r}"
        return status

    def go_on(self, plan, fault=None):
        """Start the plan's run in the folder `out`, or resume it."""
        if not os.path.lexists(self.out / "checkpoint.npz"):
            return self.train(plan, "--out", self.out, fault=fault)
        names = ("workers", "kvstore", "data_dir") + ("impl",) * plan["impl"].endswith(".py")
        kept = {name: plan[name] for name in names if name in plan}
        return self.train(kept, "--resume", self.out, fault=fault)

    def finish(self, plan):
        """Without faults, the run in the folder `out` can be finished, and has the bits of an uninterrupted run."""
        assert self.go_on(plan) == 0, "the run cannot be finished"
        assert set(os.listdir(self.out)) == FILES, f"has the files {sorted(os.listdir(self.out))}"
        table.assert_same_bits(self.out, self.uninterrupted(plan)[0])

    def plan(self):
        """Draw the settings of a run. There are few plans, so that uninterrupted runs are shared."""
        rng = random.Random(self.rng.randrange(40))
        # only the tests' process registers the network of dropout
        row = rng.choice([row for row in table.ROWS if row.train == "yes" and row.lesson != "dropout"])
        plan = row.settings(self.data)
        plan |= {"gpus": rng.choice((1, 2, 2, 3)), "seed": rng.randrange(3), "epochs": rng.choice((5, 20, 40))}
        if row.workers in ("yes", "about") and rng.random() < 0.4 and Path(runs.MPIEXEC).exists():
            plan |= {"kvstore": "mpi", "workers": rng.choice((2, 2, 3)), "gpus": 1}
        if "kvstore" in plan or plan["gpus"] != 2:
            plan.pop("shares", None)
        return plan | ({"schedule": "cosine", "warmup_epochs": 0.5} if rng.random() < 0.3 else {})

    def uninterrupted(self, plan):
        """(folder, seconds) of an uninterrupted run of a plan."""
        key = repr(sorted(plan.items()))
        if key not in self.whole:
            folder, began = self.data / f"whole-{len(self.whole)}", time.monotonic()
            assert self.train(plan, "--out", folder) == 0, "an uninterrupted run fails"
            self.whole[key] = folder, time.monotonic() - began
        return self.whole[key]


def processes(folder):
    """Process ids of the commands of a box."""
    mark, found = f"{MARK}={folder}\0".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [int(process.name)] * (mark in (process / "environ").read_bytes())
    return sorted(runs.alive(found))


class Fault:
    """Sends a signal to a process of the command, or lets its files no longer grow, at a drawn moment.

    seconds, size: of an uninterrupted run and its checkpoint."""

    def __init__(self, rng, seconds, size):
        self.which, self.while_saving, self.delay = rng.choice(FAULTS), rng.random() < 0.4, rng.uniform(0, seconds)
        self.draw, self.size = rng.random(), int(rng.uniform(0, size))

    def __call__(self, box, process):
        """Returns the signal, FULL, or None if the command ended first."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.delay)
        while self.while_saving and process.poll() is None and not any(box.out.glob(".*.part")):
            time.sleep(0.0005)
        candidates = processes(box.folder)
        if process.poll() is not None or not candidates:
            return None
        target = candidates[int(self.draw * len(candidates))]
        with suppress(ProcessLookupError):
            if self.which == FULL:
                resource.prlimit(target, resource.RLIMIT_FSIZE, (self.size, self.size))
            else:
                os.kill(target, self.which)
        return self.which


def faults(box):
    """Up to 3 times, a fault in any process of a run."""
    plan = box.plan()
    whole, seconds = box.uninterrupted(plan)
    for _ in range(box.rng.randint(1, 3)):
        box.go_on(plan, Fault(box.rng, seconds, (whole / "checkpoint.npz").stat().st_size))
        if (box.out / "checkpoint.npz").exists():
            checkpoint.load(box.out / "checkpoint.npz")  # complete, or absent
    box.finish(plan)


def readers(box):
    """All readers in turn, in processes of their own."""
    for reader in READERS:
        command = [sys.executable, __file__, "--reader", reader, "--seed", str(box.rng.randrange(10**6))]
        done = subprocess.run(command, timeout=SECONDS)
        assert done.returncode == 0, f"{command[2:]} ends with status {done.returncode}"


# Fuzzing: each reader gets random, mutated and hostile bytes. It may raise Error, within limits on time and memory.

READER_BYTES, READER_SECONDS = 1 << 28, 60
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
    config |= {"image_dtype": "float32", "classes": 10, "version": "0", "data": "synthetic"}
    epoch = dict.fromkeys(("epoch train_seconds samples_per_second train_loss test_accuracy learning_rate").split(), 1)
    facts = {"format": 1, "config": config, "history": [epoch], "steps": 3, "loss_sum": 1.5, "seconds": 0.5}
    if rng.random() < 0.5:  # nothing is wrong except one value
        config[rng.choice(list(config))] = rng.choice(VALUES)
    encoded = json.dumps(facts).encode() if rng.random() < 0.3 else text(rng, facts)
    facts = file_of(lambda f: np.save(f, np.frombuffer(encoded, np.uint8)))
    content = archive(rng, {"W1": np.ones((2, 3), np.float32), "b1": np.ones(2)}, **{"facts.json.npy": facts})
    return {"checkpoint.npz": content + hashlib.sha256(content).hexdigest().encode() * (rng.random() < 0.95)}


def read_checkpoint(folder):
    """What `evaluate` and `train --resume` do with the facts of a checkpoint."""
    run = evaluate.read(folder)
    assert "\x1b" not in str(run.position)
    run.config.resumed({}).learning_rate(run.position.steps, 10)


def make_own_data(rng):
    arrays = {f"{part}_images": np.zeros((4, 3, 2, 2), np.uint8) for part in ("train", "test")}
    return {"data.npz": archive(rng, arrays | {f"{part}_labels": np.arange(4) for part in ("train", "test")})}


def make_image(rng):
    width, kind = rng.choice((1, 28, 300)), rng.choice(evaluate.FORMATS)
    image = table.Image.frombytes("L", (width, 28), rng.randbytes(28 * width)).convert(rng.choice(("L", "RGB")))
    return {"image.png": mutated(rng, file_of(lambda file: image.save(file, kind)))}


def make_network(rng):
    with mx.name.NameManager():  # the same names for each input
        x = mx.sym.Activation(mx.sym.Convolution(mx.sym.var("data"), kernel=(2, 2), num_filter=2), act_type="relu")
        x = mx.sym.FullyConnected(mx.sym.flatten(x), num_hidden=3)
    shapes = zip(x.list_arguments(), x.infer_shape(data=(1, 1, 4, 4))[0])
    with tempfile.NamedTemporaryFile() as file:
        mx.nd.save(file.name, {f"arg:{name}": mx.nd.ones(shape) for name, shape in shapes if name != "data"})
        params = Path(file.name).read_bytes()
    if rng.random() < 0.5:
        return {"net-symbol.json": x.tojson().encode(), "net-0000.params": mutated(rng, params)}
    return {"net-symbol.json": text(rng, json.loads(x.tojson())), "net-0000.params": params}


def read_network(folder):
    table.convert.from_files(folder / "net-symbol.json", folder / "net-0000.params", (1, 4, 4))


READERS = {  # {name: (make(rng) -> {file: content}, read(folder))}
    "checkpoint": (make_checkpoint, read_checkpoint),
    "own data": (make_own_data, lambda folder: datasets.load("own", folder)),
    "images": (make_image, lambda folder: evaluate.read_image(folder / "image.png", (3, 8, 8))),
    "network": (make_network, read_network),
}


def fuzz(reader, inputs, seed, first=0):
    """Give a reader inputs. Returns the exit status."""
    make, read = READERS[reader]
    most = 4 << 30 if reader == "network" else READER_BYTES  # without enough memory, MXNet may crash
    before = resource.getrlimit(resource.RLIMIT_AS)
    for n in range(first, first + inputs):
        files = make(random.Random(f"{reader} {seed} {n}"))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        again = f"python tests/torture/torture.py --reader '{reader}' --seed {seed} --first {n} --inputs 1"
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            resource.setrlimit(resource.RLIMIT_AS, (used + most, before[1]))
            signal.alarm(READER_SECONDS)
            try:
                with suppress(datasets.Error):
                    read(Path(folder))
            except BaseException as error:
                last = "".join(traceback.format_tb(error.__traceback__)[-3:])
                print(f"error: {error!r} {last}\n  {content[:200]!r}\n  again: {again}", file=sys.stderr)
                return 1
            finally:
                signal.alarm(0)
                resource.setrlimit(resource.RLIMIT_AS, before)
    return 0


def torture(minutes, seed, data):
    """Run scenarios with seeds seed, seed + 1, ... until the time is up. Returns the number of violations."""
    until, first, violations, whole = time.monotonic() + 60 * minutes, seed, 0, {}
    while seed == first or time.monotonic() < until:
        with tempfile.TemporaryDirectory(prefix="box-", ignore_cleanup_errors=True) as folder:
            box = Box(random.Random(seed), folder, data, whole)
            try:
                (readers if seed % 9 == 0 else faults)(box)
            except (AssertionError, datasets.Error, subprocess.TimeoutExpired) as violation:
                error = (box.folder / "err").read_text(errors="replace")[-3000:] if seed % 9 else ""
                again = f"python tests/torture/torture.py --minutes 0 --seed {seed}"
                print(f"violation: {violation!r}", error, f"again: {again}", sep="\n  ", flush=True)
                violations += 1
        seed += 1
    print(f"scenarios: {seed - first}, violations: {violations}")
    return violations


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # commands may hold any bytes
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reader", choices=READERS, help="fuzz only one reader")
    parser.add_argument("--inputs", type=int, default=1000, help="with --reader: how many")
    parser.add_argument("--first", type=int, default=0, help="with --reader: the first input's number")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.reader:
        sys.exit(fuzz(options.reader, options.inputs, options.seed, options.first))
    with tempfile.TemporaryDirectory(prefix="torture-") as data:
        table.Runs(Path(data))
        sys.exit(1 if torture(options.minutes, options.seed, data) else 0)


if __name__ == "__main__":
    main()
