"""Sums over all ranks, bucket by bucket, while the rank computes."""
