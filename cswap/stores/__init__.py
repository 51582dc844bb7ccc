"""Stores of encodings: the host tier and the disk tier."""
