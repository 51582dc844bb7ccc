"""Kernels of cswap, one file per format; numpy and numba only."""
