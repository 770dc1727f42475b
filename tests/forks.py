"""Programs that begin as forks of a process that has imported what they need, which takes seconds for PyTorch."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from gluon_mgpu.support import subprocesses
from gluon_mgpu.support.subprocesses import Finished, users_environment

SECONDS = 300  # the time limit of a program

# Reads one program per line, and prints its process ID and its exit status.
SERVER = """
import gc, json, os, runpy, sys
gc.freeze()  # so that collections in a fork copy no memory
for line in sys.stdin:
    program = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    os._exit(0)
os.setsid()
for number, file in enumerate(program["streams"]):
    os.dup2(os.open(file, os.O_RDWR), number)
os.chdir(program["folder"])
if program["environment"] is not None:
    os.environ.clear()
    os.environ.update(program["environment"])
kind, *sys.argv = program["words"]
if kind == "-c":
    code, sys.argv[0], sys.path[0] = sys.argv[0], kind, ""
    exec(code, {"__name__": "__main__"})
elif kind == "-m":
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    sys.argv.insert(0, kind)
    sys.path.insert(0, program["folder"])
    runpy.run_path(kind, run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # freeing all modules takes as long as a short program
"""


class Forks:
    """Runs programs as `subprocesses.run` does, but as forks of one process that has run `imports`, code, first."""

    def __init__(self, imports):
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name, "server.py")
        file.write_text(imports + SERVER)
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.server = subprocess.Popen([sys.executable, file], env=users_environment(), **streams)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.communicate()
        self.folder.cleanup()

    def run(self, command, *, env=None, folder=None, seconds=None, on_line=None):
        """command: Python, then "-u", "-c" and code, "-m" and a module, or a file, then arguments. on_line: called with
        each line at the end."""
        streams = [Path(self.folder.name, name) for name in ("in", "out", "err")]
        for stream in streams:
            stream.write_text("")
        words = [str(word) for word in command[1:] if word != "-u"]
        program = {"words": words, "streams": list(map(str, streams))}
        program |= {"folder": str(folder or os.getcwd()), "environment": env}
        print(json.dumps(program), file=self.server.stdin, flush=True)
        child, late = int(self.server.stdout.readline()), threading.Event()
        timer = threading.Timer(seconds or SECONDS, lambda: (late.set(), os.kill(child, signal.SIGKILL)))
        timer.start()
        status = int(self.server.stdout.readline())
        timer.cancel()
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the program has started
        out, err = (stream.read_text(errors="replace") for stream in streams[1:])
        for line in out.splitlines(keepends=True) if on_line else ():
            on_line(line)
        return Finished(None if late.is_set() else status, out, err)


@contextmanager
def forked(module, forks):
    """Let a module of the package run its programs as forks."""
    with patch.object(module, "subprocesses", SimpleNamespace(**{**vars(subprocesses), "run": forks.run})):
        yield
