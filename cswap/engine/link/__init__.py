"""Tensors that leave a device over its link to the host, and come back."""
