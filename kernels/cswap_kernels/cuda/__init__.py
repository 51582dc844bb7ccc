"""The CUDA twins of the tile functions, and the kernels around them. Start at container.py."""
