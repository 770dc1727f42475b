"""Runs old MXNet 1.x programs unchanged with current versions of Python and NumPy, even on machines without GPUs."""
