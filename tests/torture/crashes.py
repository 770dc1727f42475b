"""Scenarios with processes: signals, restarts, networks, two runs in one folder, too little memory."""

import importlib.util
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from box import Box, Skipped

from gluon_mgpu.training import records

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


def disturb(rng, box, plan, which=SIGNALS):
    seconds = box.usual_seconds(plan)
    for _ in range(rng.randint(1, 3)):
        faults = [Send(rng, seconds, which, plan.get("workers", 1)) for _ in range(rng.randint(1, 3))]
        done = box.go_on(plan, faults=faults)
        box.check_checkpoint()
        if {fault.which for fault in faults} <= {signal.SIGSTOP, signal.SIGPIPE}:  # Python ignores SIGPIPE
            box.require(done.status == 0, "a short stop or SIGPIPE ends the run", done)
    box.finish(plan)


def signals(rng, box):
    """Up to 3 signals for one process, up to 3 times; then the run is finished with the bits of an undisturbed run."""
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
    """`launch --restarts`: a run that loses processes again and again ends with the bits of an undisturbed run."""
    plan = {**box.plan(rng.choice((2, 2, 4))), "restarts": 9}
    seconds = box.usual_seconds(plan)
    delays = [rng.uniform(0.1, 1) * seconds for _ in range(rng.randint(1, 3))]
    checkpoints = []  # for each kill, whether there was one

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

    done = box.train(plan, "--out", box.out, faults=[kill_some], seconds=600)
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


SCENARIOS = {
    "signals": (signals, 3),
    "workers": (workers, 3),
    "horovod": (horovod, 3),
    "restarts": (restarts, 2),
    "network": (network, 1),
    "two runs": (two_runs, 1),
    "memory": (memory, 1),
}
