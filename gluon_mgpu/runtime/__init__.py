"""MXNet 1.9.1 on current machines: engine settings, devices, processes. Imports nothing from the packages above."""
