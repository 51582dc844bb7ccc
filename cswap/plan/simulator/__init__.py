"""Simulates a plan: one training step with its swaps, operator by operator."""
