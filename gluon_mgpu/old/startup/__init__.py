"""The folder that `run` puts on PYTHONPATH; Python imports `sitecustomize` from it at startup."""
