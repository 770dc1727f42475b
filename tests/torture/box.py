"""A box: the folders in which one scenario runs commands, and the invariants that every command must keep."""

import ctypes
import fcntl
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import runs

from gluon_mgpu.training import checkpoint, records

FILES = {"checkpoint.npz", "config.json", "curves.png", "metrics.jsonl"}  # the files of a finished run
MARK = "TORTURE_BOX"  # environment variable of every process of a scenario
SECONDS = 240  # time limit for one command, on a busy machine
SECONDS_TO_END = 15  # for the other processes, after the command has ended
MAX_MEMORY = 6 << 30  # bytes, for all processes of a command together
MAX_PROCESSES = 64  # per command
OWN_STATUS = {0, 1, 2, 130}
CRASH = re.compile(
    "Traceback|core dumped|terminate called|Assertion|Check failed|Segmentation fault|Fatal Python|Exception ignored|"
    "Stack trace|stack smashing|double free|corrupted|SIG(SEGV|ABRT|BUS|FPE|ILL)|Aborted|Bus error|"
    "Floating point exception|Illegal instruction"
)
# Files of libraries in the home directory; .nv is written by NVIDIA's driver, .ipython is created by `kernel`.
CACHES = re.compile(
    r"home/(\.(cache|config)(/(matplotlib|gluon_mgpu)(/.*)?)?|\.horovod(/cache.bin)?|\.nv(/.*)?|\.ipython)$"
)

Finished = namedtuple("Finished", "status out err seconds sent")


class Violation(Exception):
    """A broken invariant; ends the scenario."""


class Skipped(Exception):
    """This machine cannot run the scenario."""


class TimeIsUp(Exception):
    """There is no time left for another command."""


class Box:
    """folder: the scenario's own folder. cache: holds results of undisturbed runs. isolated: own mounts and network.
    until: the time (time.monotonic) after which no command is started."""

    def __init__(self, rng, folder, cache, isolated, until=math.inf):
        self.rng, self.folder, self.cache, self.isolated = rng, Path(folder), Path(cache), isolated
        self.until = until
        for name in ("home", "tmp", "cwd", "runs"):
            (self.folder / name).mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(runs.ROOT),
            "HOME": str(self.folder / "home"),
            "TMPDIR": str(self.folder / "tmp"),
            "MPLCONFIGDIR": str(self.cache / "matplotlib"),
            "XDG_CACHE_HOME": str(self.cache),
            "GLUON_MGPU_MIRROR": "http://127.0.0.1:9",  # nothing is downloaded
            MARK: str(self.folder),
        }
        self.out = self.folder / "runs" / "run"
        self.surroundings = {}  # environment variables of every command, except those of undisturbed runs
        self.log = []  # the commands so far
        self.counts = Counter()  # see COUNTED in torture.py
        self.killed = False  # whether SIGKILL ended the run that was started last
        self.resumed = 0  # how often a run was resumed from a checkpoint after that

    # Commands

    def train(self, plan, *more, restarts=0, **options):
        """Run train.py with a plan's options, on a plan's number of workers."""
        words = [f"--{name}={value}" for name, value in plan.items() if name != "workers"]
        command = [*runs.TRAIN, "--device=cpu", *words, *map(str, more)]
        if "workers" in plan:
            launcher = [*runs.LAUNCH, f"--restarts={restarts}"]
            command = runs.command(plan["kvstore"], plan["workers"], program=command, launcher=launcher)
        return self.run(command, **options)

    def go_on(self, plan, **options):
        """Start the plan's run in the folder `out`, or resume it."""
        killed, self.killed = self.killed, False
        if not records.exists(self.out):
            return self.train(plan, "--out", self.out, **options)
        self.resumed += killed
        kept = {name: plan[name] for name in ("workers", "kvstore") if name in plan}
        return self.train(kept, "--resume", self.out, **options)

    def run(
        self,
        command,
        environment=None,
        faults=(),
        limits=None,
        paths=(),
        seconds=SECONDS,
        may_crash=False,
        ordinary=False,
    ):
        """Run a command until it ends, and check the invariants of every command.

        environment: added to the box's. faults: functions fault(box, process, sent), each called in a thread when the
        command starts. limits: {resource: bytes}. paths: folders that the command may change, besides runs/. may_crash:
        whether libraries may abort or hang. ordinary: whether even root may read only what its file mode allows.
        """
        if time.monotonic() > self.until:
            raise TimeIsUp
        command = [str(word) for word in command]
        environment = {**self.surroundings, **(environment or {})}
        self.log.append(shlex.join([*(f"{n}={v}" for n, v in environment.items()), *command])[:2000])
        self.counts["starts"] += 1
        before = self.files(paths)
        began, sent = time.monotonic(), []
        with open(self.folder / "out", "w+b") as out, open(self.folder / "err", "w+b") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            options = {"env": {**self.environment, **environment}, "cwd": self.folder / "cwd", **streams}
            prepare = partial(_prepare_child, limits or {}, ordinary)
            process = subprocess.Popen(command, start_new_session=True, preexec_fn=prepare, **options)
            pool = ThreadPoolExecutor(1 + len(faults))
            disturbing = [pool.submit(fault, self, process, sent) for fault in faults]
            try:
                status = self._wait(process, began + seconds)
                ended, _ = wait(disturbing, SECONDS_TO_END)
                left = self._left_processes()
            finally:
                self.kill()
                process.wait()
        texts = [(self.folder / name).read_bytes().decode(errors="replace") for name in ("out", "err")]
        done = Finished(status, *texts, time.monotonic() - began, sent)
        self.counts["signals"] += len(sent)
        self.counts["kills"] += sent.count(signal.SIGKILL)
        self.killed = signal.SIGKILL in sent and status != 0
        failed = [fault.exception() for fault in ended if fault.exception()]
        self.require(not failed, f"the test itself failed: {failed}", done)
        self._check_end(done, left, command, may_crash)
        changed = {path for path, what in self.files(paths).items() ^ before.items()}
        if signal.SIGKILL in sent:  # Matplotlib's folder, if MPLCONFIGDIR cannot be written; horovodrun's semaphores
            changed = {path for path in changed if not re.search("^tmp/matplotlib-|/dev/shm/sem.mp-", path)}
        self.require(not changed, f"files outside the run's folder changed: {sorted(changed)[:5]}", done)
        return done

    def _wait(self, process, until):
        while process.poll() is None:
            if time.monotonic() > until:
                return None
            running = self.processes()
            self.require(len(running) < MAX_PROCESSES, f"has {len(running)} processes")
            memory = sum(_resident(pid) for pid in running)
            self.require(memory < MAX_MEMORY, f"uses {memory >> 20} MiB of memory")
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        return process.returncode

    def _left_processes(self):
        until = time.monotonic() + SECONDS_TO_END
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[-200:] for pid in left]

    # Invariants

    def require(self, condition, line, done=None):
        if condition:
            return
        if done:
            line += f"\n  status {done.status}, sent {done.sent}, standard error:\n{done.err[-3000:]}"
        raise Violation(line)

    def _check_end(self, done, left, command, may_crash):
        if may_crash:
            return
        self.require(done.status is not None, "did not end in time", done)
        self.require(not left, f"processes are left: {left}", done)
        lines = done.err.splitlines()
        by_horovodrun, doctor = "horovodrun" in command[0], "doctor" in command[1]
        if by_horovodrun:  # horovodrun's own lines and statuses are not this project's
            lines = [line.partition(":")[2] for line in lines if re.match(r"\[\d+\]<std", line)]
        else:
            signals = {-number for number in done.sent}
            self.require(done.status in OWN_STATUS | signals, "unexpected exit status", done)
        errors = [line for line in lines if line.startswith("error: ")]
        starts = 1 + sum("restarting all processes" in line for line in lines)
        self.require(len(errors) <= starts, f"{len(errors)} error lines", done)
        if done.status in (1, 2) and not (done.sent or by_horovodrun):
            self.require(errors or (doctor and "problem" in done.out), "failed without an error line", done)
        crash = CRASH.search("\n".join([*lines, done.out]))
        ours = re.search(f'File "{re.escape(str(runs.ROOT))}/(gluon_mgpu|scripts)/', done.err)
        if crash and done.sent and crash[0] in ("Traceback", "Fatal Python") and not ours:
            crash = None  # the signal arrived while Python itself was starting
        self.require(not crash, f"shows {crash and crash[0]!r}", done)

    def check_checkpoint(self, out=None):
        """A checkpoint is complete or absent. Returns (arrays, facts), or None."""
        path = (out or self.out) / "checkpoint.npz"
        try:
            return checkpoint.load(path) if path.exists() else None
        except Exception as error:
            raise Violation(f"the checkpoint is not complete: {error!r}") from error

    def finish(self, plan):
        """Without faults, the run in the folder `out` can be finished, and equals an undisturbed run bit for bit."""
        self.check_checkpoint()
        done = self.go_on(plan)
        self.require(done.status == 0, "the run cannot be finished", done)
        self.require(set(os.listdir(self.out)) == FILES, f"has the files {sorted(os.listdir(self.out))}", done)
        # With dist_sync, the order in which the gradients of more than 2 workers arrive changes the rounding.
        if plan.get("workers", 1) <= 2 or plan["kvstore"] == "horovod":
            self.same_bits(self.out, self.undisturbed(plan), done)
            self.counts["resumed"] += self.resumed

    def same_bits(self, out, expected, done=None):
        """Two runs have equal parameters and histories."""
        (a, found), (b, wanted) = self.check_checkpoint(out), self.check_checkpoint(expected)
        differ = [name for name in {**a, **b} if name not in a or name not in b or not np.array_equal(a[name], b[name])]
        self.require(not differ, f"parameters differ from those of an undisturbed run: {sorted(differ)}", done)
        names = ("epoch", "train_loss", "test_accuracy", "learning_rate")
        histories = [[[epoch[name] for name in names] for epoch in facts["history"]] for facts in (found, wanted)]
        self.require(histories[0] == histories[1], f"the histories differ: {histories}", done)
        self.counts["compared"] += 1

    def plan(self, workers=1, kvstore="dist_sync"):
        """Draw options of a short training. There are few plans, so that undisturbed runs are shared."""
        rng = random.Random(f"{self.rng.randrange(12)} {workers}")
        plan = {
            "dataset": "synthetic",
            "impl": rng.choice(("scratch", "highlevel")),
            "gpus": rng.choice((1, 2, 2, 3, 8)) if workers == 1 else rng.choice((1, 2)),
            "limit": rng.choice((200, 400, 600)),
            "batch-size": rng.choice((16, 32, 50)),
            "epochs": rng.choice((2, 3)),
            "seed": rng.randrange(3),
            **rng.choice(({}, {"momentum": 0.9, "schedule": "cosine"}, {"accumulate": 3, "weight-decay": 0.001})),
            **rng.choice(({}, {}, {"clip-norm": 0.5, "warmup-epochs": 0.5})),
        }
        if plan["impl"] == "highlevel":
            plan["model"] = rng.choice(("lenet", "lenet-max"))
        return plan if workers == 1 else {**plan, "workers": workers, "kvstore": kvstore}

    def undisturbed(self, plan):
        """The folder of an undisturbed run of a plan, which is run once and kept in the cache."""
        name = "-".join(str(value) for _, value in sorted(plan.items()))
        folder = self.cache / re.sub(r"\W", "_", name)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "seconds").exists():
                surroundings, self.surroundings = self.surroundings, {}
                shutil.rmtree(folder / "run", ignore_errors=True)  # from a scenario that was killed
                done = self.train(plan, "--out", folder / "run")
                self.surroundings = surroundings
                self.require(done.status == 0, "an undisturbed run fails", done)
                (folder / "seconds").write_text(json.dumps(done.seconds))
        return folder / "run"

    def usual_seconds(self, plan):
        return json.loads((self.undisturbed(plan).parent / "seconds").read_text())

    def files(self, paths=()):
        """{path: (size, time of the last change)} of everything that a command must not change."""
        found = {}
        for top in (self.folder / "home", self.folder / "tmp", self.folder / "cwd", Path("/dev/shm")):
            if top in paths or (top == Path("/dev/shm") and not self.isolated):
                continue
            for path in top.rglob("*"):
                name = os.path.relpath(path, self.folder)
                if not CACHES.match(name):
                    stat = path.lstat()
                    found[name] = (stat.st_size, 0 if path.is_dir() else stat.st_mtime_ns)
        return found

    # Processes

    def processes(self):
        """Process ids of everything that the box's commands started and that has not ended."""
        return processes(f"{self.folder}\0")

    def kill(self):
        kill(f"{self.folder}\0")

    def mount(self, folder, options, again=False):
        if not self.isolated:
            raise Skipped("needs root, or a user who may create namespaces")
        folder.mkdir(parents=True, exist_ok=True)
        kind = ["-o", f"remount,{options}"] if again else ["-t", "tmpfs", "-o", options, "none"]
        return subprocess.run(["mount", *kind, str(folder)], capture_output=True).returncode == 0


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


def be_ordinary():
    """Give up root's right to read and write files regardless of their modes."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP


def _prepare_child(limits, ordinary):
    if ordinary:
        be_ordinary()
    os.nice(5)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the command ends with this program
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for which, most in {resource.RLIMIT_AS: 64 << 30, resource.RLIMIT_FSIZE: 1 << 30, **limits}.items():
        resource.setrlimit(which, (most, most))


def _resident(pid):
    """Bytes of a process's own memory."""
    with suppress(OSError, ValueError):
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
        return (int(resident) - int(shared)) * resource.getpagesize()
    return 0
