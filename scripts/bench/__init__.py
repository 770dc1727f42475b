"""Benchmarks. `grids` runs the points of a grid, each in a process of its own: `__main__`, with `mxnet_points` or
`torch_points`. The pages docs/performance.md, partition.md and
second-device.md show results."""
