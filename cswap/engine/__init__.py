"""The engine: what happens to a saved tensor between pack and unpack."""
