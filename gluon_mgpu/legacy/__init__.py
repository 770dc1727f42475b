"""Runs old MXNet 1.x programs unchanged, with current Python and NumPy, even on machines without GPUs."""
