"""Options: their declarations, and how they are read and checked. Imports neither torch nor MPI."""
