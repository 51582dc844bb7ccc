"""The order of a step: which tensor comes when, a plan's decision for it, and whether it stays."""
