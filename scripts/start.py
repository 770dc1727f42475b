"""All scripts here call `start`, which requires gluon_mgpu to be installed for the Python that runs them."""

import sys


def start(command, module=None):
    """Run a command. module: the module that defines the command; None: gluon_mgpu.commands.COMMAND."""
    try:
        from gluon_mgpu.__main__ import run
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error} for {sys.executable}: use .venv/bin/python, which `make install` sets up, or "
            "run `pip install .`"
        )
    run(module or f"gluon_mgpu.commands.{command}", command)
