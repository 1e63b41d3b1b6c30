"""Real bytes, real time: the ranks of an MPI job."""
