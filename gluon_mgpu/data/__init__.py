"""The data sets, your own data, batches, and how batches are split. This package knows nothing about training."""
