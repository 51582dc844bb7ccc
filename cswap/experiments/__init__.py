"""Experiments that users run, too: benchmarks of codecs, accuracy against latency, reports.

Nothing else in cswap imports this package, except its commands.
"""
