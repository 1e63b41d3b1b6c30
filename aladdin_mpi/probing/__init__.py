"""Cluster files for simulations, from a description in words or measured over MPI."""
