"""Runs the programs in programs/, each for a package that needs MXNet 1.x, and prints a table of the results.

`python tests/legacy/packages.py [PROGRAM]...` starts each program with `python` and with `gluon-mgpu run`. Packages are
installed below .venvs/, without the old versions of MXNet and NumPy that they ask for.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from gluon_mgpu.runtime import engine

PROGRAMS = Path(__file__).parent / "programs"
FOLDER = Path(__file__).parents[2] / ".venvs" / "packages" / platform.python_version()
RUN = [sys.executable, "-m", "gluon_mgpu", "run"]


def install(program: Path) -> Path:
    """Install what the program's first line names; returns the folder."""
    folder = FOLDER / program.stem
    if not folder.exists():
        packages = shlex.split(program.read_text().splitlines()[0])[3:]
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], check=True)
    return folder


def start(command: list[str], program: Path, folder: Path) -> str:
    """Run a program with the packages in folder. Returns "runs", or the error."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    env = {**engine.users_environment(), "PYTHONPATH": path}
    run = subprocess.run([*command, str(program)], env=env, capture_output=True, text=True, timeout=600)
    errors = re.findall(r"^[\w.]*(?:Error|Exception): .*", run.stderr, re.M)
    return "runs" if run.returncode == 0 else (errors or [f"exit status {run.returncode}"])[-1]


if __name__ == "__main__":
    chosen, failed = sys.argv[1:], 0
    print(f"| Python {platform.python_version()}, NumPy {metadata.version('numpy')} | `python` | `gluon-mgpu run` |")
    print("|---|---|---|")
    for program in sorted(PROGRAMS.glob("*.py")):
        if not chosen or program.stem in chosen:
            folder = install(program)
            plain, run = (start(command, program, folder) for command in ([sys.executable], RUN))
            failed += run != "runs"
            print(f"| {program.stem} | {plain} | {run} |", flush=True)
    sys.exit(bool(failed))
