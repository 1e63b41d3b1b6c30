"""What the decentralised algorithms share."""
