#!/usr/bin/env python
"""Run a training on several processes of this machine: `python scripts/launch.py --help`."""

import sys

try:
    from gluon_mgpu.cli import launch
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    launch()
