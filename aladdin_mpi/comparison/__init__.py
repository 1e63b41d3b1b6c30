"""Comparison of algorithms under equal conditions."""
