"""Recommendations for a cluster, from simulations of every algorithm."""
