"""Encoding for the wire: number formats and compression."""
