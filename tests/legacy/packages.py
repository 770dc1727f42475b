"""Runs the programs in programs/, each for a package that needs MXNet 1.x, and prints a table of the results.

`python tests/legacy/packages.py [PROGRAM]...` starts each program with `python` and with `gluon-mgpu run`, once for
each line "# pip install". Packages are installed below .venvs/, without the old versions of MXNet and NumPy that they
ask for.
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


def install(packages: list[str]) -> Path:
    """Install packages; returns the folder, which has the name of the first one."""
    folder = FOLDER / packages[0]
    if not folder.exists():
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], check=True)
    return folder


def start(command: list[str], program: Path, folder: Path) -> str:
    """Run a program with the packages in folder; its argument is the first one. Returns "runs", or the error."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    env = {**engine.users_environment(), "PYTHONPATH": path}
    package = folder.name.partition("==")[0]
    run = subprocess.run([*command, str(program), package], env=env, capture_output=True, text=True, timeout=600)
    errors = re.findall(r"^[\w.]*(?:Error|Exception): .*", run.stderr, re.M)
    return "runs" if run.returncode == 0 else (errors or [f"exit status {run.returncode}"])[-1]


if __name__ == "__main__":
    chosen, failed = sys.argv[1:], 0
    print(f"| Python {platform.python_version()}, NumPy {metadata.version('numpy')} | `python` | `gluon-mgpu run` |")
    print("|---|---|---|")
    for program in sorted(PROGRAMS.glob("*.py")):
        for line in re.findall("^# pip install (.*)", program.read_text(), re.M):
            if not chosen or program.stem in chosen:
                folder = install(shlex.split(line))
                plain, run = (start(command, program, folder) for command in ([sys.executable], RUN))
                failed += run != "runs"
                print(f"| {folder.name} | {plain} | {run} |", flush=True)
    sys.exit(bool(failed))
