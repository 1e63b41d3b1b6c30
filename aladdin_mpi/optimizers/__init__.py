"""Optimizers that work on parts of a flat vector: momentum SGD, and any of torch's."""
