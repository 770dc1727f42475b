"""MXNet on current machines: settings before it loads, devices, CUDA, aarch64, MXNet 2, NumPy's old names."""
