"""Code shared by the strategies for ``lightning`` and ``pytorch_lightning``; imports neither."""
