"""What autograd holds instead of a saved tensor, and which tensors may be saved that way."""
