"""`python -m bench fit`: memory goals, held by cswap and by checkpointing as many blocks."""
