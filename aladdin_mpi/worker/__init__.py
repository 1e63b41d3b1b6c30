"""Base classes of all algorithms' workers and servers."""
