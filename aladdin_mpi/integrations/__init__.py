"""Replacements for parts of other libraries that train with any algorithm."""
