"""Benchmarks, one module per topic. scripts/bench.py runs them; docs/performance.md shows results."""
