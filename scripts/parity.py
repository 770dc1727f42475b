#!/usr/bin/env python
"""Hold the port against what the notebooks printed: `python scripts/parity.py --help`."""

from start import start

if __name__ == "__main__":
    start("parity")
