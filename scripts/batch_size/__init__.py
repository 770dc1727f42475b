"""The lecture's experiment with batch sizes and learning rates. docs/batch-size.md shows results."""
