#!/usr/bin/env python
"""Install a Jupyter kernel for old MXNet notebooks: `python scripts/kernel.py --help`."""

from start import start

if __name__ == "__main__":
    start("kernel")
