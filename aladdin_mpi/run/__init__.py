"""One rank of a run, from its options to its results."""
