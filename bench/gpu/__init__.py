"""Benchmarks that need a CUDA device; run as `python -m bench gpu --help`."""
