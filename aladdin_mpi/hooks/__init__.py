"""What accompanies training: checkpoints, evaluation, metrics, suspension."""
