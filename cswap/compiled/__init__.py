"""Codecs that torch.compile traces into a model's graphs, where the compiler fuses them."""
