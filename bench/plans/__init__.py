"""`python -m bench plans`: planning policies beside each other, simulated."""
