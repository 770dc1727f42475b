#!/usr/bin/env python
"""Show what lies on which device during a training step: `python scripts/walkthrough.py --help`."""

import sys

try:
    from gluon_mgpu.cli import walkthrough
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    walkthrough()
