"""Parts of benchmarks.convergence: its networks, runs, values, bars and plots."""
