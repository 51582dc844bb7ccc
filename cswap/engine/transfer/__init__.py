"""The way of a tensor: from its own memory to the store and back."""
