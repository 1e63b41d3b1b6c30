"""MPI engine: the ranks of an MPI job, in real time."""
