"""Benchmarks. `grids` runs the points of a grid, each in a process of its own: `__main__`, with `mxnet_points` or
`torch_points`. docs/performance.md shows results."""
