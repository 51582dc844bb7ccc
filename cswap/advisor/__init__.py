"""The execution advisor: which codec, for this tensor, on this machine."""
