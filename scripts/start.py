"""What each script here begins with: the package must be installed for the Python that runs it."""

import sys


def start(command):
    """Run a command of the package; ends with one line where that is not there."""
    try:
        from gluon_mgpu.__main__ import run
    except KeyboardInterrupt:
        sys.exit(130)
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {error} for {sys.executable}: use .venv/bin/python, which `make install` sets up, or "
            "`pip install .`"
        )
    run(command)
