"""Simulation engine: all ranks in one process, with reproducible results."""
