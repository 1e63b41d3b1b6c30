"""All-reduce of gradients, bucket by bucket, overlapping computation."""
