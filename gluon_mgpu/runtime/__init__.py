"""Support for MXNet 1.9.1 on current machines: engine settings, devices and processes. Imports no other subpackage."""
