#!/usr/bin/env python
"""Train LeNet on one or several devices: `python scripts/train.py --help`."""

from gluon_mgpu.cli import train

if __name__ == "__main__":
    train()
