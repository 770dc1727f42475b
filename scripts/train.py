#!/usr/bin/env python
"""`python scripts/train.py` is `gluon-mgpu train`, where those who know the notebooks look for it."""

import sys


def start(module: str, command: str) -> None:
    """Run a module's click command, or exit with one line if this Python lacks the package."""
    try:
        from gluon_mgpu.__main__ import run_command
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error} for {sys.executable}: use .venv/bin/python (`make install`), or `pip install .`")
    run_command(module, command)


if __name__ == "__main__":
    start("gluon_mgpu.commands.train", "train")
