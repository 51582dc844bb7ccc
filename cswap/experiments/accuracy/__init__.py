"""`python -m bench accuracy`: accuracy lost and latency saved by lossy swapping."""
