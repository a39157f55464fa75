"""Adding datasets to a trained detector, and removing them."""
