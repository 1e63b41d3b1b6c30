"""Datasets and models: reading, augmentation, sampling, loading."""
