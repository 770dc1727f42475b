"""`python -m gluon_mgpu train …` is `gluon-mgpu train …`, and `python scripts/train.py …`."""

from __future__ import annotations

import importlib
import sys
import traceback

from gluon_mgpu.runtime import engine


def main() -> None:
    if sys.argv[1:2] == ["doctor"]:  # without the other commands, which cannot be imported where NumPy is broken
        run("doctor", sys.argv[2:], "gluon-mgpu doctor")
    else:
        run("main", prog_name="gluon-mgpu")


def run(command: str, args: list[str] | None = None, prog_name: str | None = None) -> None:
    """Run a command, of those that `cli` has; where a library that it needs does not load, one line says so."""
    try:
        module = importlib.import_module(
            "gluon_mgpu.commands.doctor" if command == "doctor" else "gluon_mgpu.commands.main"
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        sys.exit(f"error: {engine.line_of(error)}")
    getattr(module, command)(args, prog_name=prog_name)


if __name__ == "__main__":
    main()
