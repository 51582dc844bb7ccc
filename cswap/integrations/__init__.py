"""Trainers of other packages: cswap on at the start, off at the end, figures in their logs.

Each module imports its framework; cswap itself needs none of them.
"""
