"""Modules in which no tensor leaves run without the hooks."""
