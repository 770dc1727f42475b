"""All commands here except build_horovod.py call `start`, which reports an error if gluon_mgpu is not installed.

They run this file by its path instead of importing it: if PYTHONSAFEPATH is set, Python cannot import from this folder.
"""

import sys
from pathlib import Path


def start(command, module=None):
    """Run a command. module: the module in this folder that defines the command; None: gluon_mgpu.commands.COMMAND."""
    try:
        from gluon_mgpu.__main__ import run
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error} for {sys.executable}: use .venv/bin/python, which `make install` sets up, or "
            "run `pip install .`"
        )
    if module:
        sys.path.insert(0, str(Path(__file__).parent))
    run(module or f"gluon_mgpu.commands.{command}", command)
