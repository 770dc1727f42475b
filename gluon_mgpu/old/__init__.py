"""Runs old MXNet 1.x programs unchanged, in an environment of their time, even on machines without GPUs."""
