"""Policies, one file each; ``solve(problem)`` makes the plan. No policy imports another."""
