"""The training algorithms, one file each, and what they share."""
