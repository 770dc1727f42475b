"""Compiles MXNet 1.9.1's kernels for GPUs that the wheel mxnet-cu112 has none for. See docs/install.md.

The wheel has kernels for compute capability 5.0 to 8.6, and registers and launches them through libcudart.so.11.0.
`sources` writes CUDA files that instantiate the kernels in names.txt from MXNet's sources. `build` compiles them, and
launch.c, to the library that `compat.cuda` opens before the first `import mxnet`.
"""
