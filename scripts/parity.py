#!/usr/bin/env python
"""Hold the port against what the notebooks printed: `python scripts/parity.py --help`."""

import sys

try:
    from gluon_mgpu.cli import parity
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    parity()
