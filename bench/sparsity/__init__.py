"""`python -m bench sparsity`: what tensors are like in real training, for traces without values."""
