"""Modelled time: all ranks in one process, the same to the bit each time."""
