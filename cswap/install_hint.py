"""How packages that cswap can do without are installed: the one place that says it."""

from __future__ import annotations


def to_install(extra: str) -> str:
    """The command for a message. cswap is not published: pip does not find its name.

    Args:
        extra: a group of optional packages of ``pyproject.toml``.

    >>> to_install("host")
    'pip install ".[host]" in a checkout of cswap'
    """
    return f'pip install ".[{extra}]" in a checkout of cswap'
