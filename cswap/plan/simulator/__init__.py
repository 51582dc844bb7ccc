"""The simulator of a plan: one step with its swaps, operator by operator."""
