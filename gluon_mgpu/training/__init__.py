"""What both lessons need for real training, written once."""
