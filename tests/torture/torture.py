"""Tortures training runs: draws random scenarios from a seed, runs them, and checks the invariants in box.py.

`make torture MINUTES=30 SEED=1`. Each scenario runs in its own process and, if this user may create namespaces, with
its own mounts, network and process ids on a read-only file system, so that it leaves nothing behind. See
docs/reliability.md.
"""

import argparse
import ctypes
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))  # for runs.py
ISOLATED = "TORTURE_ISOLATED"  # environment variable: this process has its own namespaces
UNSHARE = "unshare --mount --pid --net --ipc --fork --kill-child --mount-proc".split()
SETUP = 'ip link set lo up; mount --bind "$1" "$1"; mount -t tmpfs -o size=1g none "$2"; mount -t tmpfs none /dev/shm; '
SETUP += 'mount -o remount,bind,ro /; shift 2; exec "$@"'
SECONDS = 900  # time limit for one scenario; each of its commands has a shorter one
REPORT = 600  # seconds between tables during a run
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
JOBS = 2  # scenarios at a time
SKIPPED, CUT = 3, 5  # exit statuses; CUT: the time was up before the scenario ended
COUNTS = "counts:"  # begins a line of a scenario's output
# commands, signals, SIGKILLs; results compared with undisturbed runs, and how often these runs were resumed from a
# checkpoint after SIGKILL
COUNTED = ("starts", "signals", "kills", "compared", "resumed")
COLUMNS = ("runs", "skipped", "violations", *COUNTED)
# Kinds of scenarios that draw their own environment, or in which horovodrun or a limit would fail with some variables.
PLAIN = ("environment", "command line", "horovod", "file size", "memory", "readers")


def scenarios():
    """{kind: (function(rng, box), share of the time)}"""
    import fuzz
    import scenarios

    return {**scenarios.SCENARIOS, **fuzz.SCENARIOS}


def one(kind, seed, folder, cache, until):
    """Run one scenario; after the time `until`, it starts no more commands. Returns the exit status."""
    from box import Box, Skipped, TimeIsUp, Violation
    from scenarios import surroundings

    box = Box(random.Random(seed), folder, cache, ISOLATED in os.environ, until)
    try:
        if kind not in PLAIN:
            box.surroundings = surroundings(box.rng, box)
        scenarios()[kind][0](box.rng, box)
    except Skipped as reason:
        print(f"skipped: {reason}")
        return SKIPPED
    except TimeIsUp:
        return CUT
    except Violation as violation:
        print(f"violation: {violation}\n  commands:", *box.log, sep="\n    ")
        return 1
    finally:
        box.kill()
        print(COUNTS, json.dumps(box.counts))
    return 0


def isolation():
    """The program and arguments that give a process its own namespaces, or []."""
    for user in ([], ["--user", "--map-root-user"]):
        command = [*UNSHARE, *user, "sh", "-c", "mount -t tmpfs none /mnt && ip link set lo up"]
        if shutil.which("unshare") and subprocess.run(command, capture_output=True).returncode == 0:
            return [*UNSHARE, *user]
    return []


def end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def isolated(arguments, cache, folder, prefix):
    """Run this program in its own namespaces. Returns its exit status."""
    (Path(folder) / "box").mkdir()
    command = [sys.executable, __file__, *arguments, "--cache", cache, "--folder", f"{folder}/box"]
    if prefix:
        command = [*prefix, "sh", "-c", SETUP, "sh", cache, f"{folder}/box", *command]
    environment = {**os.environ, **({ISOLATED: "1"} if prefix else {})}
    return subprocess.run(command, env=environment, preexec_fn=end_with_parent).returncode


class Runner:
    """Runs scenarios until the time is up."""

    def __init__(self, minutes, seed, kinds):
        self.rng, self.until = random.Random(seed), time.monotonic() + 60 * minutes
        self.shares = {kind: share for kind, (_, share) in scenarios().items() if not kinds or kind in kinds}
        self.lock, self.busy = threading.Lock(), dict.fromkeys(self.shares, 0.0)
        self.counts, self.running, self.skips = Counter(), set(), {}

    def run(self, cache):
        import box

        with ThreadPoolExecutor(JOBS) as pool:
            workers = [pool.submit(self._work, cache) for _ in range(JOBS)]
            try:
                while wait(workers, REPORT).not_done:
                    with self.lock:
                        self.table()
            except KeyboardInterrupt:
                for which in INTERRUPTS:
                    signal.signal(which, signal.SIG_IGN)
                print("interrupted")
                self.until = 0
                while wait(workers, 0.1).not_done:
                    for process in list(self.running):
                        with suppress(ProcessLookupError):
                            os.killpg(process.pid, signal.SIGKILL)
        box.kill(cache)  # without namespaces, processes of killed scenarios may be left
        for worker in workers:
            worker.result()  # raises any exception from the worker

    def _work(self, cache):
        while time.monotonic() < self.until:
            with self.lock:
                kind = min(self.busy, key=lambda kind: (self.busy[kind] / self.shares[kind], kind))
                seed = self.rng.randrange(10**6)
                began = time.monotonic()
                self.busy[kind] += 10  # until it is known how long this takes
            command = [sys.executable, __file__, "--scenario", kind, "--seed", str(seed), "--cache", cache]
            command += ["--until", str(self.until)]
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
            environment = {**os.environ, "TMPDIR": cache}
            process = subprocess.Popen(command, start_new_session=True, env=environment, **streams)
            self.running.add(process)
            try:
                out, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out = f"violation: did not end in time\n{process.communicate()[0]}"
            self.running.discard(process)
            with self.lock:
                self.busy[kind] += time.monotonic() - began - 10
                self._count(kind, seed, process.returncode, out)

    def _count(self, kind, seed, status, out):
        counts = re.findall(f"^{COUNTS} (.*)$", out, re.MULTILINE)
        for name, n in json.loads(counts[-1] if counts else "{}").items():
            self.counts[kind, name] += n
        if status == 0:
            self.counts[kind, "runs"] += 1
        elif status == SKIPPED:
            self.counts[kind, "skipped"] += 1
            self.skips[kind] = out.partition(COUNTS)[0].strip()
            self.busy[kind] += 20  # so that it is not drawn again immediately
        elif status != CUT and self.until:  # otherwise, it was stopped
            self.counts[kind, "runs"] += 1
            self.counts[kind, "violations"] += 1
            print(f"{out}\n  again: python tests/torture/torture.py --scenario '{kind}' --seed {seed}\n", flush=True)

    def table(self):
        """Print the table. Returns the number of violations."""
        row = "{:13}" + " {:>10}" * (len(COLUMNS) + 1)
        print(row.format("scenario", *COLUMNS, "minutes"))
        for kind in [*self.shares, "all"]:
            cells = [
                sum(n for (k, what), n in self.counts.items() if kind in (k, "all") and what == column)
                for column in COLUMNS
            ]
            seconds = sum(seconds for k, seconds in self.busy.items() if kind in (k, "all"))
            skip = self.skips.get(kind, "") if not cells[0] else ""
            print(row.format(kind, *cells, f"{seconds / 60:.1f}"), skip, flush=True)
        return cells[2]


def main():
    sys.stdout.reconfigure(errors="backslashreplace")  # commands may hold any bytes
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="kinds of scenarios")
    parser.add_argument("--scenario", help="run only one scenario, with --seed")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cache:  # this process runs one scenario
        end_with_parent()
    for which in INTERRUPTS:
        if signal.getsignal(which) != signal.SIG_IGN:  # as nohup does
            signal.signal(which, signal.default_int_handler)
    if options.folder:
        sys.path.insert(0, str(HERE.parents[1]))
        try:
            sys.exit(one(options.scenario, options.seed, options.folder, options.cache, options.until))
        except Exception:
            traceback.print_exc()
            sys.exit(4)
    prefix = isolation()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        cache = options.cache or folder
        if options.scenario:
            arguments = [f"--scenario={options.scenario}", f"--seed={options.seed}", f"--until={options.until}"]
            try:
                sys.exit(isolated(arguments, cache, folder, prefix))
            except KeyboardInterrupt:
                import box

                box.kill(folder)
                sys.exit(130)
        if not prefix:
            print("this user may not create namespaces: scenarios that mount a disk are skipped")
        print(f"{options.minutes:g} minutes from seed {options.seed}", flush=True)
        runner = Runner(options.minutes, options.seed, options.only)
        runner.run(cache)
    sys.exit(1 if runner.table() else 0 if runner.until else 130)


if __name__ == "__main__":
    main()
