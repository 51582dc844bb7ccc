"""The order of a step: which tensor comes when, what a plan says of it, what stays."""
