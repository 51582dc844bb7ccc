"""Rematerialisation: saved tensors are computed again instead of stored.

`finder.Finder.find` examines a tensor that autograd is about to save. A cheap, deterministic
operator may have made it from tensors that are held anyway. Then the result is a `record.Remat`:
the operators to run again, and their inputs. docs/remat.md lists the operators, and the cases in
which a tensor must be stored.
"""
