#!/usr/bin/env python
"""A second device and a larger batch, the lecture's experiment: `python scripts/batch_size.py --help`."""

import sys

try:
    from gluon_mgpu.cli import batch_size
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    batch_size()
