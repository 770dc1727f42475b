"""Benchmarks. `grids` runs the points of a grid, each in a process of its own: `__main__`, with `mxnet_points` or
`torch_points`. performance.md, partition.md and second-device.md in docs/ show results."""
