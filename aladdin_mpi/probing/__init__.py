"""A cluster described in words, or measured over MPI, as a file for the simulation."""
