"""The life cycle of a run on one rank: from its options to its results."""
