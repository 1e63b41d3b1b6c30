"""What every algorithm's worker and server are made of."""
