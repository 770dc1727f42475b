"""Code for real training that both lessons share."""
