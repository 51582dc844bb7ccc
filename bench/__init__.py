"""Demo and benchmarks of cswap; run as `python -m bench --help` from the repository root."""
