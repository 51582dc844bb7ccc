"""Meters: time, saved bytes, memory of the host."""
