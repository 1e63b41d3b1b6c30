"""Data sets and models: reading, augmenting, sampling, loading."""
