"""Training scripts that were written for other libraries."""
