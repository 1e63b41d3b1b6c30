"""Messages and time: one interface, with engines for MPI and for simulations."""
