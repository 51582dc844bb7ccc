"""Frozen records that the layers exchange; standard library only."""
