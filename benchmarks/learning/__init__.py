"""Parts of benchmarks.convergence: its networks, runs, figures, bars and pictures."""
