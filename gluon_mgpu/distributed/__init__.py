"""Training in several processes, on one or more machines."""
