"""A module next to ``print_surroundings.py``."""

VALUE = 7
