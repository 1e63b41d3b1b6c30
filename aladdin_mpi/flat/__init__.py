"""The user's model as flat vectors, cut into buckets."""
