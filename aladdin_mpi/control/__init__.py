"""What ranks tell each other beside gradients and models."""
