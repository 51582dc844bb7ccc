"""`python -m bench overhead`: the cost of hooks beyond kernels."""
