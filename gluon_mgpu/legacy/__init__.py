"""Runs programs that were written for MXNet 1.x, GPUs and the Python of their time, unchanged, on today's machines."""
