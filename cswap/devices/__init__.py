"""Devices that run codecs and copies: one file per kind."""
