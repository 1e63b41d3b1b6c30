"""Programs that the benchmarks run under mpirun. Rank 0 prints one line of JSON."""
