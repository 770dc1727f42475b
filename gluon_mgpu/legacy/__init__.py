"""Runs old MXNet 1.x programs unchanged, with current Python and NumPy, and without GPUs if there are none."""
