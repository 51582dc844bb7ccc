"""`python -m bench demo`: two models trained with and without cswap."""
