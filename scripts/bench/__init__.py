"""Measuring: a module a subcommand of scripts/bench.py. docs/performance.md has what they found."""
