"""Rematerialisation: saved tensors that are computed again rather than stored.

`finder.Finder.find` looks at a tensor that autograd is about to save. If a cheap, deterministic
operator made it from tensors that are held anyway, the result is a `record.Remat`: the operators
to run again, and what they need. See docs/remat.md for the operators and for the cases in which
nothing is found.
"""
