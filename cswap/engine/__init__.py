"""The engine: the way of a saved tensor from pack to unpack."""
