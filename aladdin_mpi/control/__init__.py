"""Control messages between ranks, other than gradients and models."""
