"""What the strategies for ``lightning`` and ``pytorch_lightning`` share; imports neither."""
