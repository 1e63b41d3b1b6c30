"""One rank's training, segment by segment, and the joint for hooks."""
