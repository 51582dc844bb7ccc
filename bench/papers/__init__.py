"""`python -m bench papers`: the papers' figures beside ours, simulated, and why they differ."""
