"""Parts of benchmarks.large: its cases, runs, predictions, pictures and words."""
