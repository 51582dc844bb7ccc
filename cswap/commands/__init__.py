"""Commands of the command line, and how they print. `cswap.cli` puts them together."""
