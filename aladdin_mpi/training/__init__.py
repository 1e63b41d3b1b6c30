"""The run: data, schedule, evaluation, checkpoints, metrics, report."""
