"""Codecs: the contract, the registry, and one file per family."""
