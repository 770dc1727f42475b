#!/usr/bin/env python
"""Runs the command that this file's name says: train.py, bench.py and others in this folder are links to main.py.

`python scripts/train.py` is `gluon-mgpu train`. bench.py and parity.py run the package of that name in this folder;
only a checkout has them. `python scripts/main.py` lists the other commands.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    try:
        from gluon_mgpu.__main__ import run
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error} for {sys.executable}: use .venv/bin/python (`make install`), or `pip install .`")
    command = Path(__file__).stem
    in_folder = Path(__file__).with_suffix("").is_dir()
    if in_folder:
        sys.path.insert(0, str(Path(__file__).parent))  # Python does not do so if PYTHONSAFEPATH is set
    run(f"{command}.cli" if in_folder else f"gluon_mgpu.commands.{command}", command)
