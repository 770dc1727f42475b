"""Scenarios in which processes are lost: signals, restarts, two runs in one folder, too little memory."""

import importlib.util
import os
import re
import resource
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from box import Skipped, Violation, draw_plan

GENTLE = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, *GENTLE, signal.SIGSTOP, signal.SIGHUP, signal.SIGPIPE)
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
            if self.which == signal.SIGPIPE and not _ignores(target, self.which):
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


def _ignores(pid, which):
    mask = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(mask, 16) >> (which - 1) & 1


def signals(rng, box):
    """Up to 3 signals for one process, up to 3 times; then the run is finished with the bits of an undisturbed run."""
    disturb(rng, box, draw_plan(rng))


def workers(rng, box):
    """The same for a random process of a run of 2 to 4 workers."""
    plan = draw_plan(rng, rng.choice((2, 2, 3, 4)))
    disturb(rng, box, plan)


def horovod(rng, box):
    """The same for a worker of a run with Horovod; a worker that is stopped for a short time is not lost."""
    if not importlib.util.find_spec("horovod"):
        raise Skipped("Horovod is not installed")
    plan = {**draw_plan(rng, 2), "kvstore": "horovod"}
    disturb(rng, box, plan, (signal.SIGKILL,))


def disturb(rng, box, plan, which=SIGNALS):
    out, seconds = box.folder / "runs" / "run", box.usual_seconds(plan)
    for _ in range(rng.randint(1, 3)):
        faults = [Send(rng, seconds, which, plan.get("workers", 1)) for _ in range(rng.randint(1, 3))]
        begun = any((out / name).exists() for name in ("config.json", "checkpoint.npz"))
        more = {name: plan[name] for name in ("workers", "kvstore") if name in plan}
        done = box.train(more if begun else plan, "--resume" if begun else "--out", out, faults=faults)
        box.check_checkpoint(out)
        harmless = {signal.SIGSTOP, signal.SIGPIPE}  # Python ignores SIGPIPE
        if {fault.which for fault in faults} <= harmless:
            box.require(done.status == 0, "a short stop or SIGPIPE ends the run", done)
    box.finish(plan, out)


def restarts(rng, box):
    """`launch --restarts`: a run that loses processes again and again ends with the bits of an undisturbed run."""
    plan = {**draw_plan(rng, 2), "restarts": 9}
    out, kills = box.folder / "runs" / "run", rng.randint(1, 3)
    seconds = [rng.uniform(0.1, 1) * box.usual_seconds(plan) for _ in range(kills)]

    def kill_some(box, process, sent):
        for delay, draw in zip(seconds, [rng.random() for _ in seconds]):
            time.sleep(delay)
            others = [pid for pid in box.processes() if pid != process.pid]
            if process.poll() is None and others:
                with suppress(ProcessLookupError):
                    os.kill(others[int(draw * len(others))], signal.SIGKILL)

    done = box.train(plan, "--out", out, faults=[kill_some], seconds=600)
    box.require(done.status == 0, "the run is not restarted", done)
    box.finish(plan, out)


def two_runs(rng, box):
    """Two runs in one folder: one writes, the other is refused."""
    plan = draw_plan(rng)
    out, seconds = box.folder / "runs" / "run", box.usual_seconds(plan)
    second = []

    def start(box, process, sent):
        time.sleep(delay)
        other = type(box)(rng, box.folder / "second", box.cache, box.isolated)
        try:
            second.append(other.train(plan, "--out", out))
        except Violation as violation:
            second.append(violation)

    delay = rng.choice((0, rng.uniform(0, seconds)))
    (box.folder / "second").mkdir()
    first = box.train(plan, "--out", out, faults=[start])
    while threading.active_count() > 1:
        time.sleep(0.05)
    box.require(not isinstance(second[0], Violation), f"the second run: {second[0]}", first)
    statuses = sorted((first.status, second[0].status))
    box.require(statuses == [0, 2], f"two runs in one folder end with {statuses}: {second[0].err}", first)
    box.finish(plan, out)


def memory(rng, box):
    """Too little address space. MXNet's library may then abort; what it leaves is complete."""
    plan = draw_plan(rng)
    out = box.folder / "runs" / "run"
    most = int(2 ** rng.uniform(27, 33))
    box.train(plan, "--out", out, limits={resource.RLIMIT_AS: most}, may_crash=True)
    box.finish(plan, out)


SCENARIOS = {
    "signals": (signals, 3),
    "workers": (workers, 3),
    "horovod": (horovod, 1),
    "restarts": (restarts, 2),
    "two runs": (two_runs, 1),
    "memory": (memory, 1),
}
