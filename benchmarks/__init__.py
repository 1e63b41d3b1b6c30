"""Measurements of aladdin_mpi and what they need."""
