"""Records the operators and saved tensors of a training step. This part of planning needs torch."""
