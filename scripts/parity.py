#!/usr/bin/env python
"""Compares results with what the notebooks printed: the package `parity` in this folder, which only a checkout has."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # Python does not do so if PYTHONSAFEPATH is set
    from train import start

    start("parity.cli", "parity")
