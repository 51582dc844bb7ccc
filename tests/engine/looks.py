"""Steps that are looked at, for tests."""

from cswap.engine.order import looks


def look_every(monkeypatch, steps):
    """Let an engine look at every tensor in one step of so many."""
    monkeypatch.setattr(looks, "EVERY", steps)
