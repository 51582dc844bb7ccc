"""Objects that autograd holds instead of saved tensors, and tensors that may be saved so."""
