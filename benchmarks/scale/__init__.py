"""Parts of benchmarks.large: its cases, runs, predictions, plots and tables."""
