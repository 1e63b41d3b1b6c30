"""One rank's training, segment by segment, and the interface for hooks."""
