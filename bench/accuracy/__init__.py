"""`python -m bench accuracy`: what lossy swapping costs in accuracy, and buys in latency."""
