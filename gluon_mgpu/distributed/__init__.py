"""Training on several processes, on one machine or more."""
