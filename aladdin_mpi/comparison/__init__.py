"""Several algorithms under equal conditions: run, measured and reported."""
