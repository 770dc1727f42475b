#!/usr/bin/env python
"""Runs the command that this file's name says: train.py, bench.py and others in this folder are links to main.py.

`python scripts/train.py` is `gluon-mgpu train`. Only a checkout has batch_size.py, bench.py and parity.py; each runs
the package of that name in this folder. `python scripts/main.py` lists the other commands.
"""

import sys
from pathlib import Path


def main(script):
    try:
        from gluon_mgpu.__main__ import run
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error} for {sys.executable}: use .venv/bin/python, which `make install` sets up, or "
            "run `pip install .`"
        )
    command = script.stem
    if script.with_suffix("").is_dir():
        sys.path.insert(0, str(script.parent))  # Python does not do so if PYTHONSAFEPATH is set
        run(f"{command}.cli", command)
    else:
        run(f"gluon_mgpu.commands.{command}", command)


if __name__ == "__main__":
    main(Path(__file__))
