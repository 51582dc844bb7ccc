"""`python -m bench sparsity`: tensor values of real training, for traces without values."""
