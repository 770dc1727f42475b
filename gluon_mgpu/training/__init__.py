"""Training code that both lessons share."""
