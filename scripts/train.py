#!/usr/bin/env python
"""Train LeNet on one or several devices: `python scripts/train.py --help`."""

import sys

try:
    from gluon_mgpu.cli import train
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    train()
