"""A memory goal: `cswap.install(model, fit="16GiB")` (docs/fit.md)."""
