#!/usr/bin/env python
"""Install a Jupyter kernel for old MXNet notebooks: `python scripts/kernel.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("kernel")
