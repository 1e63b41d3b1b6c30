"""Hooks that accompany training: checkpoints, evaluation, metrics, suspension."""
